"""What a target writes behind a prompt that opens thoughts, or closes them.

A template that ends its prompts so writes the turn into a chat in another way. Read next: `tags.py`; `turns.py`,
which asks here where a turn as it is written does not begin with its prompt, or lacks its thoughts.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ..raw import BadRow
from ..shapes import Chat
from ..templates import ChatTemplate
from .message import THOUGHTS
from .tags import (
    CLOSING,
    EMPTY,
    OPENING,
    closed_by,
    closes_thoughts,
    closing_of,
    is_open,
    opened_by,
    opening_of,
    own_thoughts,
)

_PROBE = "THOUGHTSxOFxTHISxTURN"


class PromptDiffers(BadRow):
    """The text that is trained on does not begin with the prompt that the decoder would get."""


class Behind(NamedTuple):
    """What a target writes behind a prompt that opens or closes thoughts."""

    text: str
    change: str | None
    """What is not as the row has it: `thoughts`, which a closing prompt leaves no room for, or `no thoughts`, where
    the prompt opens some and the row has none."""


class _Parted(NamedTuple):
    """A turn without its thoughts, and what stands in front of it then."""

    message: dict[str, Any]
    thoughts: str | None
    """The thoughts, their closing tag, and the blanks behind it."""
    close: str
    """That tag."""


def opening(prompt: str) -> str:
    """The tag, with the blanks behind it, by which a prompt opens thoughts; empty where it opens none."""
    found = opened_by(prompt)
    return found[0] if found else ""


def behind_prompt(template: ChatTemplate, chat: Chat, at: int, prompt: str) -> Behind:
    """What the target writes as turn `at` behind a prompt that opens thoughts or closes them.

    Raises:
        PromptDiffers: the template begins the turn in another way.
    """
    closes, opens = closed_by(prompt), opened_by(prompt)
    found = closes or opens
    assert found is not None
    head = prompt[: found.start()]
    parted = _parted(chat.messages[at], found)
    bare = template.write(chat, [*chat.messages[:at], parted.message])
    if not bare.startswith(head):
        raise PromptDiffers(f"turn {at + 1}: {difference(head, bare)}")
    rest = bare[len(head) : template.without_tail(bare, len(head))]
    if closes:
        # what the prompt has, and no blank more: those behind it the target writes
        has_all = rest.startswith(found[0])
        rest = rest.removeprefix(found[0]) if has_all else _without(EMPTY, rest).removeprefix(closing_of(found))
        return Behind(rest, "thoughts" if (parted.thoughts or "").replace(parted.close, "").strip() else None)
    if parted.thoughts is None:
        return Behind(_without(EMPTY, rest), "no thoughts")
    return Behind(parted.thoughts + _without(OPENING, _without(CLOSING, _without(EMPTY, rest))), None)


def _without(tags: re.Pattern[str], text: str) -> str:
    """A text without the tags that it begins with."""
    found = tags.match(text)
    return text[found.end() :] if found else text


def cut_in_thoughts(template: ChatTemplate, chat: Chat, at: int, prompt: str) -> str | None:
    """The text of turn `at`, prompt and all, if it was cut off in its thoughts: nothing of it closes them.

    The prompt alone where it leaves no room for thoughts; None where the template writes them as they stand.

    Raises:
        PromptDiffers: the template does not tell how they begin.
    """
    message, opens = chat.messages[at], opened_by(prompt)
    content, own = message["content"], own_thoughts(message)
    if message.get("tool_calls"):
        return None
    if closed_by(prompt):
        return prompt if is_open(content) or (own is not None and not content.strip()) else None
    if own is None:
        return prompt + _without_opening(content, opens) if opens and not closes_thoughts(content) else None
    if content.strip():
        return None
    if opens:
        return prompt + (own.lstrip("\n") if opens["blanks"] else own)
    probe = {**{name: each for name, each in message.items() if name not in THOUGHTS}, THOUGHTS[0]: _PROBE}
    before, found, _ = template.write(chat, [*chat.messages[:at], probe]).partition(_PROBE)
    if not found or not before.startswith(prompt):
        raise PromptDiffers(
            f"turn {at + 1} was cut off in its thoughts, and the template does not tell how they begin"
        )
    return before + own.lstrip("\n")


def difference(prompt: str, text: str) -> str:
    """Where a text ceases to begin with a prompt, in both."""
    at = next((i for i, (a, b) in enumerate(zip(prompt, text)) if a != b), min(len(prompt), len(text)))
    start = max(0, at - 20)
    return f"the decoder's prompt reads {prompt[start : at + 40]!r}, the text to train on {text[start : at + 40]!r}"


def _parted(message: dict[str, Any], found: re.Match[str]) -> _Parted:
    """A turn and its thoughts, which it keeps in a field of their own or in front of its content.

    How many blanks a target writes around them is not in the row: it is guessed by the prompt.
    """
    own, close = own_thoughts(message), closing_of(found)
    bare = {name: each for name, each in message.items() if name not in THOUGHTS}
    content = message["content"]
    if own is not None:
        inner = own.strip("\n")
        lines = found[0][-1:].isspace()
        return _Parted(
            {**bare, "content": content.lstrip("\n")}, f"{inner}\n{close}\n\n" if lines else f"{inner}{close}", close
        )
    before, tag, behind = content.partition(close)
    if not tag:
        return _Parted(bare, None, close)
    answer = behind.lstrip()
    blanks = behind[: len(behind) - len(answer)]
    return _Parted({**bare, "content": answer}, f"{_without_opening(before, found)}{close}{blanks}", close)


def _without_opening(thoughts: str, found: re.Match[str]) -> str:
    """Thoughts behind the tag and the blanks with which the prompt has opened them, or closed others."""
    tag, stripped = opening_of(found), thoughts.lstrip()
    if tag is None:
        return _without(OPENING, stripped)
    if not stripped.startswith(tag):
        return thoughts
    return stripped[len(tag) :].removeprefix(found.groupdict().get("blanks") or "")
