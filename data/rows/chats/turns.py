"""What an assistant has to generate in a chat: the documents to train on, a prompt and an answer each.

The unit is one answer: the prompt as the decoder renders it up to this turn, what is written behind it, and
its end. Where the template leaves what it has written as it is, one text holds all answers of a chat. Where
it rewrites its history (it drops thoughts, or strips text), every answer has a text of its own; which of
both, rendering tells. Read next: `thoughts.py`; `rows/encode.py`, which turns characters into tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..shapes import Chat
from ..templates import ChatTemplate, Span
from .answer import AnswerText, Piece, why_left_out
from .everything import everything
from .own_text import own_text, says_nothing, with_end, without_end
from .tags import is_open
from .thoughts import PromptDiffers, cut_in_thoughts

LossOn = Literal["assistant", "last", "all"]


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
    "hollow": "behind an empty pair of tags for thoughts, as the template writes them where a row has none",
    "unwritten": "without their thoughts, which the template does not write",
    "calls": "without calls, which the template does not write",
    "changed": "in other words or blanks than the row's, as the template writes them",
    "cut": "cut off, and learnt without an end",
}
"""Why answers are not in the loss, the first six; how others are not as the row has them."""
LEFT = ("other prompt", "empty", "marked", "other tokens", "edited", "without ids")


def pieces_of(template: ChatTemplate, chat: Chat, loss_on: LossOn) -> Pieces:
    """The texts to train on.

    Raises:
        BadRow: the template refuses the chat. PromptDiffers: no prompt of it is how the text begins.
    """
    text, notes = template.write(chat), Counter[str]()
    answers = _answers(template, chat, text, last=loss_on == "last", notes=notes)
    groups = _chained(answers)
    is_one = len(groups) < 2 and all(text.startswith(each.text) for each in answers)
    notes.update(why for why in (why_left_out(chat, each) for each in answers) if why)
    if loss_on == "all":
        texts = [_without_cut_end(chat, answers, text)] if is_one else [group[-1].text for group in groups]
        return Pieces(list(everything(texts, [answers] if is_one else groups, chat)), notes)
    made = [_whole(template, chat, answers, text)] if is_one else [_part(template, chat, group) for group in groups]
    out = {each.turn for each in answers if why_left_out(chat, each)}
    return Pieces([_without_turns(each, out) for each in made], notes)


def _answers(template: ChatTemplate, chat: Chat, text: str, *, last: bool, notes: Counter[str]) -> list[AnswerText]:
    # nobody asks for an opening word: the decoder always has a prompt
    turns = [at for at, each in enumerate(chat.messages) if each["role"] == "assistant" and at >= max(chat.asked, 1)]
    found: list[AnswerText] = []
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


def _answer(template: ChatTemplate, chat: Chat, at: int, text: str, notes: Counter[str]) -> AnswerText:
    prompt, message = template.prompt(chat, at), chat.messages[at]
    upto = text if at == len(chat.messages) - 1 else template.write(chat, chat.messages[: at + 1])
    is_cut = not message.get("ended", not is_open(message["content"]))
    if is_cut and (thinking := cut_in_thoughts(template, chat, at, prompt)) is not None:
        notes.update(["cut", *(["thoughts"] if thinking == prompt else [])])
        return AnswerText(at, len(prompt), thinking, None, is_cut)
    found = own_text(template, chat, at, prompt, upto)
    if is_cut:
        own = without_end(template, chat, at, found.text, len(prompt))
    else:
        own = with_end(template, chat, at, found.text)
    rendered = upto if found.is_rendered else None
    silent = says_nothing(message, own[len(prompt) :])
    answer = AnswerText(at, len(prompt), own, rendered, is_cut, found.text[len(own) :], silent)
    if found.change and not why_left_out(chat, answer):
        notes[found.change] += 1
    notes.update(["cut"] * is_cut)
    return answer


def _chained(answers: Sequence[AnswerText]) -> list[list[AnswerText]]:
    """The answers in groups: in each, every prompt begins with the whole text in front of it."""
    groups: list[list[AnswerText]] = []
    for each in answers:
        if groups and each.text[: each.start].startswith(groups[-1][-1].text):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _whole(template: ChatTemplate, chat: Chat, answers: Sequence[AnswerText], text: str) -> Piece:
    """The chat's text and all of its answers."""
    regions, kept = [(each.start, len(each.text)) for each in answers], _without_cut_end(chat, answers, text)
    if not template.is_marked(chat.tools):
        return Piece(kept, regions, [each.turn for each in answers])
    spans = template.marks(chat, chat.messages, text)
    return Piece(kept, *_of_turns(spans, answers))


def _without_cut_end(chat: Chat, answers: Sequence[AnswerText], text: str) -> str:
    """The chat's text up to its last answer's last word where that was cut off, whatever the template ends it with."""
    is_cut = bool(answers) and answers[-1].is_cut and answers[-1].turn == len(chat.messages) - 1
    return answers[-1].text if is_cut else text


def _part(template: ChatTemplate, chat: Chat, group: Sequence[AnswerText]) -> Piece:
    """The text up to the last of some answers, which it holds as they were written."""
    *_, last = group
    if last.upto is None or not template.is_marked(chat.tools):
        return Piece(last.text, [(each.start, len(each.text)) for each in group], [each.turn for each in group])
    found = template.marks(chat, chat.messages[: last.turn + 1], last.upto)
    return Piece(last.text, *_of_turns(found, group))


def _of_turns(spans: Sequence[Span], answers: Sequence[AnswerText]) -> tuple[list[Span], list[int]]:
    """What of each answer is marked, and its turn.

    Marks leave parts of answers out; they add nothing that is not learnt without them.
    """
    parts = [
        ((max(start, each.start), min(end, len(each.text))), each.turn)
        for start, end in spans
        for each in answers
        if start < len(each.text) and each.start < end
    ]
    return [part for part, _ in parts], [turn for _, turn in parts]


def _without_turns(piece: Piece, out: Container[int]) -> Piece:
    """The piece without the answers that are left out."""
    assert piece.spans is not None
    kept = [(span, turn) for span, turn in zip(piece.spans, piece.turns, strict=True) if turn not in out]
    return Piece(piece.text, [span for span, _ in kept], [turn for _, turn in kept])
