"""What the message of a chat says, by whatever names a server has for it: text, thoughts, calls of tools.

Servers give thoughts as `reasoning`, `reasoning_content` or `reasoning_details`, and gateways several of them at once:
that is one text, not two. Text may come as a list of parts, of which some are thoughts. Whole messages and pieces of a
stream have the same shape. No torch here, no network.
Read next: `server.py`, which keeps them as rows; `eval/server/exchange.py`, pieces of a stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEXTS = ("reasoning_content", "reasoning")
_DETAILS = "reasoning_details"
_IN_PARTS = ("text", "thinking", "summary", "content")  # the names under which a part has its text


@dataclass(frozen=True)
class Message:
    """A message, or a piece of one."""

    text: str | None
    """Without thoughts and calls; None where the server says that there is none."""
    thoughts: str
    """Empty where none stand apart from the text."""
    withheld: bool
    """Whether thoughts are there that cannot be read as they were written: summarised, or encrypted."""
    calls: str
    """Names and arguments of the tools that are called, one behind the other."""

    @property
    def apart(self) -> bool:
        """Whether something that was decoded stands beside the text."""
        return bool(self.thoughts or self.calls or self.withheld)

    @property
    def decoded(self) -> str:
        """All that was decoded, in the order in which models write it."""
        return self.thoughts + (self.text or "") + self.calls


def read_message(message: Mapping[str, Any]) -> Message:
    """The message under its usual names; what is of another type than it should be says nothing."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    own = [each for each in parts if not _is_thought(each)]
    text = "".join(map(_text_of, own)) if isinstance(content, list) else content
    details, withheld = _details(message.get(_DETAILS))
    said = [message.get(name) for name in _TEXTS]
    inside = "".join(_text_of(each) for each in parts if _is_thought(each))
    thoughts = next((each for each in (*said, details, inside) if isinstance(each, str) and each), "")
    return Message(text if isinstance(text, str) else None, thoughts, withheld, _calls(message))


def _details(details: Any) -> tuple[str, bool]:
    """The text of `reasoning_details`, and whether more of them is there than text."""
    items = [each for each in details if isinstance(each, Mapping)] if isinstance(details, list) else []
    told = [each for each in items if str(each.get("type", "reasoning.text")).endswith("text")]
    return "".join(map(_text_of, told)), len(told) < len(items)


def _is_thought(part: Any) -> bool:
    return isinstance(part, Mapping) and str(part.get("type")) in ("thinking", "reasoning")


def _text_of(part: Any) -> str:
    """The text of a part, which may be a list of parts again."""
    if isinstance(part, list):
        return "".join(map(_text_of, part))
    if isinstance(part, Mapping):
        return "".join(_text_of(part[name]) for name in _IN_PARTS if name in part)
    return part if isinstance(part, str) else ""


def _calls(message: Mapping[str, Any]) -> str:
    """Tools by today's name, and the one function by OpenAI's first one."""
    calls = message.get("tool_calls")
    found = [each.get("function") for each in calls if isinstance(each, Mapping)] if isinstance(calls, list) else []
    # a call of which nothing can be read is one all the same
    shown = ["{}" if not isinstance(each, Mapping) else _call(each) for each in found]
    old = message.get("function_call")
    return "".join([*shown, *([_call(old)] if isinstance(old, Mapping) else [])])


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else "" if arguments is None else json.dumps(arguments)
    return f"{function.get('name') or ''}{written}"
