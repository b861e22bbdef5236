"""Thoughts that a prompt opens, or closes, in front of an answer, and what a target then writes behind it.

Templates of reasoning models end their prompts with `<think>` (DeepSeek R1, Qwen3-Thinking), or with an empty
pair of tags where thinking is switched off; the same templates write the turn into a chat in another way.
Read next: `turns.py`, which asks here where a turn as it is written does not begin with its prompt.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ..raw import BadRow
from ..shapes import THOUGHTS, Chat
from ..templates import ChatTemplate

_OPENED = r"<(?P<angle>[^<>/\s]*(?:think|thought|reason)[^<>/\s]*)>|\[(?P<square>THINK)\]"
_CLOSED = r"</[^<>\s]*(?:think|thought|reason)[^<>\s]*>|\[/THINK\]|<\|END_THINKING\|>"
_OPENS = re.compile(rf"(?:{_OPENED})(?P<blanks>\s*)$", re.IGNORECASE)
_EMPTY = re.compile(rf"(?:{_OPENED})\s*(?:{_CLOSED})\s*", re.IGNORECASE)
_CLOSES = re.compile(rf"{_EMPTY.pattern}$", re.IGNORECASE)
# prompts end with few characters of tags
_TAIL = 200


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


def opening(prompt: str) -> str:
    """The tag, with the blanks behind it, by which a prompt opens thoughts; empty where it opens none."""
    found = _OPENS.search(prompt, max(0, len(prompt) - _TAIL))
    return found[0] if found else ""


def behind_prompt(template: ChatTemplate, chat: Chat, at: int, prompt: str, upto: str) -> Behind:
    """What the target writes as turn `at`, whose chat `upto` it does not begin with `prompt`.

    Raises:
        PromptDiffers: it is not for thoughts that they differ.
    """
    start = max(0, len(prompt) - _TAIL)
    closes = _CLOSES.search(prompt, start)
    opens = None if closes else _OPENS.search(prompt, start)
    found = closes or opens
    if found is None:
        raise PromptDiffers(f"turn {at + 1}: {difference(prompt, upto)}")
    head = prompt[: found.start()]
    parted = _parted(chat.messages[at], found, close=_closing(found))
    bare = template.write(chat, [*chat.messages[:at], parted.message])
    if not bare.startswith(head):
        raise PromptDiffers(f"turn {at + 1}: {difference(head, bare)}")
    rest = bare[len(head) : template.without_tail(bare, len(head))]
    empty = _EMPTY.match(rest)
    rest = rest[empty.end() :] if empty else rest
    if closes:
        return Behind(rest, None if parted.thoughts is None else "thoughts")
    if parted.thoughts is None:
        return Behind(rest, "no thoughts")
    return Behind(parted.thoughts + rest, None)


def difference(prompt: str, text: str) -> str:
    """Where a text ceases to begin with a prompt, in both."""
    at = next((i for i, (a, b) in enumerate(zip(prompt, text)) if a != b), min(len(prompt), len(text)))
    start = max(0, at - 20)
    return f"the decoder's prompt reads {prompt[start : at + 40]!r}, the text to train on {text[start : at + 40]!r}"


def _parted(message: dict[str, Any], found: re.Match[str], close: str) -> _Parted:
    """A turn and its thoughts, which it keeps in a field of their own or in front of its content."""
    own = next((str(message[name]) for name in THOUGHTS if str(message.get(name) or "").strip()), None)
    bare = {name: each for name, each in message.items() if name not in THOUGHTS}
    content = message["content"]
    if own is not None:
        lead = "" if found[0][-1:].isspace() else "\n"
        return _Parted({**bare, "content": content.lstrip("\n")}, f"{lead}{own.strip(chr(10))}\n{close}\n\n")
    before, tag, behind = content.partition(close)
    if not tag:
        return _Parted(bare, None)
    answer = behind.lstrip()
    blanks = behind[: len(behind) - len(answer)]
    return _Parted({**bare, "content": answer}, f"{_without_opening(before, found)}{close}{blanks}")


def _without_opening(thoughts: str, found: re.Match[str]) -> str:
    """Thoughts behind the tag and the blanks with which the prompt has opened them."""
    tag = found[0].partition(">")[0] + ">" if found["angle"] else f"[{found['square']}]"
    stripped = thoughts.lstrip()
    if not stripped.startswith(tag):
        return thoughts
    blanks = found.groupdict().get("blanks") or ""
    return stripped[len(tag) :].removeprefix(blanks)


def _closing(found: re.Match[str]) -> str:
    name = found["angle"]
    if name is None:
        return f"[/{found['square']}]"
    return f"<{name.replace('START', 'END')}>" if "START" in name else f"</{name}>"
