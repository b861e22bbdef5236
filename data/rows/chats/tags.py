"""The tags around thoughts: how prompts open or close them, and how a text holds them in front of an answer.

Templates of reasoning models end their prompts with `<think>` (DeepSeek R1, Qwen3-Thinking), or with an empty
pair of tags where thinking is switched off. Read next: `thoughts.py`, which finds what stands behind such prompts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .message import THOUGHTS

_OPENED = (
    r"<(?P<angle>[^<>/\s]*(?:think|thought|reason)[^<>/\s]*)>|\[(?P<square>THINK)\]|(?P<channel><\|channel>thought)"
)
_CLOSED = r"</[^<>\s]*(?:think|thought|reason)[^<>\s]*>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>"
_OPENS = re.compile(rf"(?:{_OPENED})(?P<blanks>\s*)$", re.IGNORECASE)
EMPTY = re.compile(rf"(?:{_OPENED})\s*(?:{_CLOSED})\s*", re.IGNORECASE)
"""A pair of tags with nothing between, and the blanks behind it."""
CLOSING = re.compile(rf"(?:{_CLOSED})\s*", re.IGNORECASE)
"""A closing tag alone, as some templates write it into a chat's history, and the blanks behind it."""
OPENING = re.compile(rf"(?:{_OPENED})\s*", re.IGNORECASE)
"""An opening tag alone, and the blanks behind it."""
# Seed-OSS says between the two why nothing is thought
_BETWEEN = r"(?:<(?P<between>[^<>/\s]+)>[^<>]*</(?P=between)>\s*)?"
_CLOSES = re.compile(rf"(?:(?:{_OPENED})\s*{_BETWEEN})?(?:{_CLOSED})\s*$", re.IGNORECASE)
_BEGINS = re.compile(rf"\s*(?:{_OPENED})", re.IGNORECASE)
_INLINE = re.compile(rf"(?:{_BEGINS.pattern})?(?P<thoughts>.*?)(?:{_CLOSED})", re.IGNORECASE | re.DOTALL)
# prompts end with few characters of tags
_TAIL = 200


def closed_by(prompt: str) -> re.Match[str] | None:
    """The empty pair with which a prompt ends, or a closing tag alone, which leave no room for thoughts."""
    return _CLOSES.search(prompt, max(0, len(prompt) - _TAIL))


def opened_by(prompt: str) -> re.Match[str] | None:
    """The tag, with the blanks behind it, with which a prompt opens thoughts."""
    return None if closed_by(prompt) else _OPENS.search(prompt, max(0, len(prompt) - _TAIL))


def own_thoughts(message: Mapping[str, Any]) -> str | None:
    """The thoughts that a turn keeps in a field of their own; None where there are none but blanks."""
    return next((str(message[name]) for name in THOUGHTS if str(message.get(name) or "").strip()), None)


def inline(content: str) -> tuple[str, str] | None:
    """The thoughts with which a text begins, and what stands behind the tag that closes them; None where none does.

    The tag that opens them may be missing: then the prompt had it.
    """
    found = _INLINE.match(content)
    return None if found is None else (found["thoughts"], content[found.end() :])


def begins_thoughts(content: str) -> bool:
    """Whether a text begins with the tag that opens thoughts."""
    return _BEGINS.match(content) is not None


def closes_thoughts(content: str) -> bool:
    """Whether a tag that closes thoughts stands anywhere in a text."""
    return CLOSING.search(content) is not None


def is_open(content: str) -> bool:
    """Whether a text begins with thoughts that it never closes: it was cut off in them, whatever a row says."""
    return begins_thoughts(content) and not closes_thoughts(content)


def opening_of(found: re.Match[str]) -> str | None:
    """The tag that opens thoughts at the end of a prompt; None where a closing one stands alone."""
    if found["angle"] is not None:
        return f"<{found['angle']}>"
    if found["channel"] is not None:
        return str(found["channel"])
    return None if found["square"] is None else f"[{found['square']}]"


def closing_of(found: re.Match[str]) -> str:
    """The tag that closes the thoughts which the end of a prompt opens, or has closed."""
    name = found["angle"]
    if name is not None:
        return f"<{name.replace('START', 'END')}>" if "START" in name else f"</{name}>"
    if found["channel"] is not None:
        return "<channel|>"
    return f"[/{found['square']}]" if found["square"] is not None else found[0].strip()
