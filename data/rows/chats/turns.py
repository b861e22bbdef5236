"""What an assistant has to generate in a chat: the documents to train on, a prompt and an answer each.

The unit is one answer: the prompt as the decoder renders it up to this turn, what is written behind it, and
its end. Where the template leaves what it has written as it is, one text holds all answers of a chat. Where
it rewrites its history (it drops thoughts, or strips text), every answer has a text of its own; which of
both, rendering tells. Read next: `thoughts.py`; `rows/encode.py`, which turns characters into tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Literal, NamedTuple

from ..raw import BadRow
from ..shapes import Chat, counts, is_empty
from ..templates import ChatTemplate, Span
from .tags import inline, opened_by, own_thoughts
from .thoughts import PromptDiffers, behind_prompt, change_of, cut_in_thoughts

LossOn = Literal["assistant", "last", "all"]
_PROBE = "ANSWERxOFxTHISxTURN"


class Piece(NamedTuple):
    """A text, and the characters of it that count (None: all), each stretch with the turn that it is of."""

    text: str
    spans: list[Span] | None
    turns: Sequence[int] = ()


@dataclass(frozen=True)
class Pieces:
    """The texts of a chat."""

    texts: list[Piece]
    notes: Counter[str] = field(default_factory=Counter)
    """Answers by what became of them; `NOTES` has the words."""


NOTES = {
    "other prompt": "the decoder's prompt is another text",
    "empty": "empty",
    "marked": "marked as not to be trained on (weight, train)",
    "other tokens": "have other tokens than the target wrote",
    "edited": "have ids of another text",
    "without ids": "have no ids, and others of their rows do",
    "thoughts": "without their thoughts, which prompts close",
    "no thoughts": "without thoughts, though prompts open some",
    "unwritten": "without their thoughts, which the template does not write",
    "changed": "in other words or blanks than the row's, as the template writes them",
    "cut": "cut off, and learnt without an end",
}
"""Why answers are not in the loss, the first six; how others are not as the row has them."""
LEFT = ("other prompt", "empty", "marked", "other tokens", "edited", "without ids")


class _Answer(NamedTuple):
    """One turn: the text up to its end, where its prompt ends, and the same with what the template writes behind."""

    turn: int
    start: int
    text: str
    upto: str | None
    """None where the template's own text is not what is learnt."""
    is_cut: bool
    unwritten: str = ""
    """Of one that was cut off, the end that the template writes behind it and the target never did."""


def pieces_of(template: ChatTemplate, chat: Chat, loss_on: LossOn) -> Pieces:
    """The texts to train on.

    Raises:
        BadRow: the template refuses the chat. PromptDiffers: no prompt of it is how the text begins.
    """
    text, notes = template.write(chat), Counter[str]()
    answers = _answers(template, chat, text, last=loss_on == "last", notes=notes)
    groups = _chained(answers)
    is_one = len(groups) < 2 and all(text.startswith(each.text) for each in answers)
    if loss_on == "all":
        texts = [_without_cut_end(chat, answers, text)] if is_one else [group[-1].text for group in groups]
        return Pieces(list(_all_count(template, texts, chat, answers)), notes)
    made = [_whole(template, chat, answers, text)] if is_one else [_part(template, chat, group) for group in groups]
    return Pieces([_judged(each, chat, notes) for each in made], notes)


def _answers(template: ChatTemplate, chat: Chat, text: str, *, last: bool, notes: Counter[str]) -> list[_Answer]:
    # nobody asks for an opening word: the decoder always has a prompt
    turns = [at for at, each in enumerate(chat.messages) if each["role"] == "assistant" and at]
    found: list[_Answer] = []
    differs: PromptDiffers | None = None
    for at in turns[-1:] if last else turns:
        try:
            found.append(_answer(template, chat, at, text, notes))
        except PromptDiffers as reason:
            differs = differs or reason
            notes["other prompt"] += 1
    if differs is not None and not found:
        raise differs
    return found


def _answer(template: ChatTemplate, chat: Chat, at: int, text: str, notes: Counter[str]) -> _Answer:
    prompt, message = template.prompt(chat, at), chat.messages[at]
    upto = text if at == len(chat.messages) - 1 else template.write(chat, chat.messages[: at + 1])
    is_cut = message.get("ended") is False
    if is_cut and (thinking := cut_in_thoughts(template, chat, at, prompt)) is not None:
        notes["cut"] += 1
        return _Answer(at, len(prompt), thinking, None, is_cut)
    own, is_its_own, change = _written(template, chat, at, prompt, upto)
    if change := change or change_of(message, own[len(prompt) :]):
        notes[change] += 1
    whole = own
    if is_cut:
        own = _without_end(template, chat, at, own, len(prompt))
        notes["cut"] += 1
    return _Answer(at, len(prompt), own, upto if is_its_own else None, is_cut, whole[len(own) :])


def _written(template: ChatTemplate, chat: Chat, at: int, prompt: str, upto: str) -> tuple[str, bool, str | None]:
    """The text of turn `at` with its prompt and its end, whether the template writes it so, and what it changes."""
    opens, message = opened_by(prompt), chat.messages[at]
    held = inline(message["content"])
    thoughts = (own_thoughts(message) or (held[0] if held else "")).strip()
    if upto.startswith(prompt) and not (opens and thoughts not in upto[len(prompt) :]):
        return upto[: template.without_tail(upto, len(prompt))], True, None if thoughts or not opens else "no thoughts"
    behind = behind_prompt(template, chat, at, prompt, upto)
    return prompt + behind.text, False, behind.change


def _without_end(template: ChatTemplate, chat: Chat, at: int, text: str, start: int) -> str:
    """The text up to what the template writes behind the answer: a probe in its place shows it."""
    probe = {"role": "assistant", "content": _PROBE}
    _, found, behind = template.write(chat, [*chat.messages[:at], probe]).partition(_PROBE)
    end = behind[: template.without_tail(behind, 0)]
    if not found or not text.endswith(end):
        raise BadRow(f"the end of turn {at + 1}, which was cut off, cannot be found in what the template renders")
    return text[: max(start, len(text) - len(end))]


def _chained(answers: Sequence[_Answer]) -> list[list[_Answer]]:
    """The answers in groups: in each, every prompt begins with the whole text in front of it."""
    groups: list[list[_Answer]] = []
    for each in answers:
        if groups and each.text[: each.start].startswith(groups[-1][-1].text):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _whole(template: ChatTemplate, chat: Chat, answers: Sequence[_Answer], text: str) -> Piece:
    """The chat's text and all of its answers."""
    regions, kept = [(each.start, len(each.text)) for each in answers], _without_cut_end(chat, answers, text)
    if not template.is_marked(chat.tools):
        return Piece(kept, regions, [each.turn for each in answers])
    spans = template.marks(chat, chat.messages, text)
    return Piece(kept, *_of_turns(spans, answers))


def _without_cut_end(chat: Chat, answers: Sequence[_Answer], text: str) -> str:
    """The chat's text up to its last answer's last word where that was cut off, whatever the template ends it with."""
    is_cut = bool(answers) and answers[-1].is_cut and answers[-1].turn == len(chat.messages) - 1
    return answers[-1].text if is_cut else text


def _part(template: ChatTemplate, chat: Chat, group: Sequence[_Answer]) -> Piece:
    """The text up to the last of some answers, which it holds as they were written."""
    *_, last = group
    if last.upto is None or not template.is_marked(chat.tools):
        return Piece(last.text, [(each.start, len(each.text)) for each in group], [each.turn for each in group])
    found = template.marks(chat, chat.messages[: last.turn + 1], last.upto)
    spans = [(start, min(end, len(last.text))) for start, end in found if group[0].start <= start < len(last.text)]
    return Piece(last.text, *_of_turns(spans, group))


def _of_turns(spans: Sequence[Span], answers: Sequence[_Answer]) -> tuple[list[Span], list[int]]:
    """Marked stretches of these answers, without the ends of those that have none, and the turn of each.

    Marks leave parts of answers out; they add no turn that is not learnt from without them.
    """
    kept, turns = [], []
    for start, end in spans:
        of = next((each for each in answers if start < len(each.text) and each.start < end), None)
        if of is not None:
            kept.append((start, min(end, len(of.text)) if of.is_cut else end))
            turns.append(of.turn)
    return kept, turns


def _judged(piece: Piece, chat: Chat, notes: Counter[str]) -> Piece:
    """The piece without the answers that its own turns take out of the loss."""
    assert piece.spans is not None
    out = {}
    for turn in sorted(set(piece.turns) - {-1}):
        message = chat.messages[turn]
        if not counts(message) or is_empty(message):
            out[turn] = "empty" if counts(message) else "marked"
    notes.update(out.values())
    kept = [(span, turn) for span, turn in zip(piece.spans, piece.turns, strict=True) if turn not in out]
    return Piece(piece.text, [span for span, _ in kept], [turn for _, turn in kept])


def _all_count(
    template: ChatTemplate, texts: Sequence[str], chat: Chat, answers: Sequence[_Answer]
) -> Iterator[Piece]:
    """Texts of which everything counts once, but for turns that say otherwise, and ends that nobody wrote."""
    out = [*_unwritten(chat, answers), *_marked_turns(template, chat)]
    before = ""
    for text in texts:
        holes = [(0, len(commonprefix([before, text]))), *(hole for own, hole in out if text.startswith(own))]
        before, spans = text, list(_outside(holes, len(text)))
        yield Piece(text, None) if spans == [(0, len(text))] else Piece(text, spans, [-1] * len(spans))


def _unwritten(chat: Chat, answers: Sequence[_Answer]) -> Iterator[tuple[str, Span]]:
    """Texts up to answers, each with what of it is not to be learnt: all of the answer, or an end that has none."""
    for each in answers:
        message, start, end = chat.messages[each.turn], each.start, len(each.text)
        if each.is_cut:
            yield each.text, (end, end + len(each.unwritten))
        if not counts(message) or is_empty(message):
            yield each.text, (start, end)


def _marked_turns(template: ChatTemplate, chat: Chat) -> Iterator[tuple[str, Span]]:
    """The same of turns of others that are marked."""
    for at, message in enumerate(chat.messages):
        if message["role"] != "assistant" and not counts(message):
            before = template.write(chat, chat.messages[:at]) if at else ""
            upto = template.write(chat, chat.messages[: at + 1])
            if not upto.startswith(before):
                raise BadRow(f"turn {at + 1} is marked as not to be trained on, and where it begins cannot be told")
            yield upto, (len(before), len(upto))


def _outside(holes: Sequence[Span], length: int) -> Iterator[Span]:
    """What of a text lies in none of its holes."""
    at = 0
    for start, end in sorted(holes):
        if at < start:
            yield at, min(start, length)
        at = max(at, end)
    if at < length:
        yield at, length
