"""What a target writes as one turn of a chat, behind its prompt and up to its end, by what the template renders.

Mostly that is what the template writes behind the prompt. Where it writes thoughts in another form, writes the turn in
front of it anew, or goes on behind the end, the target's own text is found here. Read next: `thoughts.py`; `turns.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..raw import BadRow
from ..shapes import Chat
from ..templates import ChatTemplate
from .tags import CLOSING, EMPTY, closed_by, inline, opened_by, opening_of, own_thoughts
from .thoughts import PromptDiffers, behind_prompt, difference

_PROBE = "ANSWERxOFxTHISxTURN"
# characters of a token
_LONGEST_END = 100


class TurnText(NamedTuple):
    """A turn as it is learnt."""

    text: str
    """From the beginning of the prompt to the end of the turn."""
    is_rendered: bool
    """Whether the template's own text begins so."""
    change: str | None
    """What is not as the row has it, by `turns.NOTES`."""


def own_text(template: ChatTemplate, chat: Chat, at: int, prompt: str, upto: str) -> TurnText:
    """What the target writes as turn `at`, of which the template renders `upto`.

    Raises:
        PromptDiffers: the decoder's prompt is another text.
    """
    message, opens, closes = chat.messages[at], opened_by(prompt), closed_by(prompt)
    thoughts = thoughts_of(message)
    if upto.startswith(prompt):
        rendered = upto[len(prompt) :]
        held = inline(message["content"]) is not None
        lost = opens and (held or not rendered.lstrip().startswith(thoughts))
        kept = closes and (held or (thoughts and thoughts in rendered))
        if not (lost or kept):
            return _rendered(template, message, prompt, rendered)
    elif not (opens or closes):
        rendered = _behind_header(template, chat, at, prompt, upto)
        return _rendered(template, message, prompt, rendered)._replace(is_rendered=False)
    behind = behind_prompt(template, chat, at, prompt)
    text = behind.text[: _end(template, message, behind.text)]
    is_rendered = upto.startswith(prompt + text)
    return TurnText(prompt + text, is_rendered, behind.change or change_of(message, text))


def thoughts_of(message: Mapping[str, Any]) -> str:
    """The thoughts of a turn, from a field of their own or from its content, without the blanks around."""
    held = inline(message["content"])
    return (own_thoughts(message) or (held[0] if held else "")).strip()


def _words_of(message: Mapping[str, Any]) -> str:
    """What a turn says behind its thoughts, without the blanks around."""
    held = inline(message["content"])
    return (held[1] if held else str(message["content"])).strip()


def change_of(message: Mapping[str, Any], written: str) -> str | None:
    """What a template leaves out of a turn: `unwritten` thoughts or `calls`, or words and blanks that it `changed`."""
    if thoughts_of(message) not in written:
        return "unwritten"
    if not all(name in written for name in _called(message)):
        return "calls"
    # between thoughts and words every template has its own blanks
    words = _words_of(message) if inline(message["content"]) else message["content"]
    return None if words in written else "changed"


def says_nothing(message: Mapping[str, Any], written: str) -> bool:
    """Whether nothing of a turn is in what is written of it, so that there is but its end to learn."""
    parts = [thoughts_of(message), *_called(message)]
    return not (_words_of(message) or any(each and each in written for each in parts))


def _called(message: Mapping[str, Any]) -> list[str]:
    """The names of the tools that a turn calls, by either form of a call."""
    calls = message.get("tool_calls") or ()
    named = [each.get("function") or each for each in calls if isinstance(each, dict)]
    return [str(each["name"]) for each in named if isinstance(each, dict) and each.get("name")]


def _rendered(template: ChatTemplate, message: Mapping[str, Any], prompt: str, rendered: str) -> TurnText:
    """A turn that the template writes behind the prompt."""
    text = rendered[: _end(template, message, rendered)]
    own, opens = _one_pair(text, thoughts_of(message)), opened_by(prompt)
    if thoughts_of(message):
        return TurnText(prompt + own, own == text, change_of(message, own))
    is_hollow = EMPTY.match(own) and inline(message["content"]) is None
    change = "no thoughts" if opens else "hollow" if is_hollow else change_of(message, own)
    return TurnText(prompt + own, own == text, change)


def _end(template: ChatTemplate, message: Mapping[str, Any], text: str) -> int:
    """Where a turn ends: behind the first end of the target that follows its thoughts and words, where it has these.

    Words may spell an end where `data.control_tokens` lets them.
    """
    start = 0
    for part in (thoughts_of(message), "" if message.get("tool_calls") else _words_of(message)):
        at = text.find(part, start)
        start = start if at < 0 else at + len(part)
    found = template.ends.search(text, start)
    return template.without_tail(text, 0) if found is None else found.end()


def _one_pair(text: str, thoughts: str) -> str:
    """A turn whose empty pair of tags is filled with thoughts that stand nowhere else, or gone where others follow."""
    lead = text[: len(text) - len(text.lstrip())]
    pair = EMPTY.match(text, len(lead))
    if pair is None:
        return text
    rest = text[pair.end() :]
    tag, closing = opening_of(pair), CLOSING.search(pair[0])
    assert tag is not None
    assert closing is not None
    if rest.lstrip().startswith(tag):
        return lead + rest.lstrip()
    if not thoughts or thoughts in text:
        return text
    between = pair[0][len(tag) : closing.start()]
    blanks = between[: len(between) // 2]
    return f"{lead}{tag}{blanks}{thoughts}{blanks}{pair[0][closing.start() :]}{rest}"


def _behind_header(template: ChatTemplate, chat: Chat, at: int, prompt: str, upto: str) -> str:
    """The turn behind its own header, where the template writes those in front of it anew.

    Raises:
        PromptDiffers: the header by which the prompt ends stands nowhere in front of the turn.
    """
    message = chat.messages[at]
    parts = [thoughts_of(message), _words_of(message), *_called(message)[:1]]
    first, asked = (
        next((each for each in parts if each and each in upto), ""),
        chat.messages[at - 1]["content"].strip(),
    )
    before = template.prompt(chat, at, answer_next=False)
    header = prompt.removeprefix(before) if template.override is None and prompt.startswith(before) else ""
    if prompt == before and asked:  # nothing announces an answer but the end of the turn in front of it
        header = prompt[prompt.rfind(asked) :] if asked in prompt else ""
    found = upto.rfind(header, 0, upto.rfind(first)) if header and first else -1
    behind = upto[found + len(header) :]
    if found < 0 or (asked and asked in behind[: behind.find(first)]):  # the header of a turn before that one
        raise PromptDiffers(f"turn {at + 1}: {difference(prompt, upto)}")
    return behind


def without_end(template: ChatTemplate, chat: Chat, at: int, text: str, start: int) -> str:
    """The text of turn `at` up to what the template writes behind its words: a probe in its place shows it.

    Raises:
        PromptDiffers: the end is another one.
    """
    probe = {"role": "assistant", "content": _PROBE}
    _, found, behind = template.write(chat, [*chat.messages[:at], probe]).partition(_PROBE)
    end = behind[: _end(template, probe, _PROBE + behind) - len(_PROBE)]
    if not found or not text.endswith(end):
        raise PromptDiffers(
            f"the end of turn {at + 1}, which was cut off, cannot be found in what the template renders"
        )
    return text[: max(start, len(text) - len(end))]


def with_end(template: ChatTemplate, chat: Chat, at: int, text: str) -> str:
    """The text of turn `at` with its end, where that is what the template begins the next turn with (GLM).

    Behind the last turn a user's is taken for the next, unless that one calls tools.
    """
    if re.search(rf"(?:{template.ends.pattern})\Z", text[-_LONGEST_END:]):
        return text
    message, following = chat.messages[at], chat.messages[at + 1 : at + 2]
    by_tool = following and following[0]["role"] not in ("user", "system")
    try:
        if by_tool or message.get("tool_calls"):
            behind = template.write(chat, [*chat.messages[: at + 1], *following])
            found = template.ends.match(behind, len(text)) if behind.startswith(text) else None
        else:
            asked = {"role": "user", "content": "why"}
            behind = template.write(chat, [asked, {"role": "assistant", "content": _PROBE}, asked])
            found = template.ends.match(behind, behind.find(_PROBE) + len(_PROBE)) if _PROBE in behind else None
    except BadRow:
        return text
    return text if found is None else text + found[0]
