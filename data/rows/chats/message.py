"""One message of a chat, whatever its columns are called: role, text, calls, thoughts and marks under one name each.

Read next: `calls.py` for tools; `rows/shapes.py`, which makes chats of messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..raw import BadRow, as_flag, check_inside, clean_text, from_json, is_object, kind_of, shown_number, shown_value
from .calls import as_calls, calls_of_text

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "ipython": "tool",
    "function_call": "assistant",
}

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names under which a turn keeps its thoughts apart from its content."""


def chat_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """The messages of a `messages` or `conversations` column, roles under our names."""
    value = from_json(value, column)
    if not isinstance(value, list):
        raise BadRow(f"{column} is {kind_of(value)}; expected a list of messages")
    if not value:
        raise BadRow(f"{column} is empty")
    messages = [_message(each, f"{column}[{at}]") for at, each in enumerate(value)]
    older = any(is_object(each) and each.get("function_call") is not None for each in value)
    return [{**each, "role": "tool"} if older and each["role"] == "function" else each for each in messages]


def _message(value: Any, what: str) -> dict[str, Any]:
    """A message under today's names.

    Raises:
        BadRow: it is no object, its role is unknown, or what it holds is neither text nor calls.
    """
    if not isinstance(value, dict):
        raise BadRow(f"{what} is {kind_of(value)}; expected an object with role and content")
    message = {key: each for key, each in value.items() if each is not None}
    role = message.pop("role", message.pop("from", None))
    content = message.pop("content", message.pop("value", None))
    if role == "function_call":
        content, message["tool_calls"] = "", calls_of_text(content, what)
    role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        found = "missing" if role is None else shown_value(role)
        raise BadRow(f"the role of {what} is {found}; expected one of {', '.join(ROLES)}")
    if role == "assistant":
        content = _without_thoughts(content, message)
    calls = as_calls(message, what)
    if content is None and not (role == "assistant" and calls):
        raise BadRow(f"{what} ({role}) has no content")
    _check_marks(message, what)
    for name, each in message.items():
        check_inside(name, f"a key of {what}")
        check_inside(each, f"{name!r:.40} of {what}")
    return {"role": role, "content": _content(content, what), **message}


def _check_marks(message: dict[str, Any], what: str) -> None:
    """Raise BadRow for a mark of a turn, whether it is trained on, that says neither yes nor no."""
    for name in ("train", "ended"):
        if name in message:
            message[name] = as_flag(message[name], f"{name} of {what}")
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise BadRow(f"weight of {what} is {shown_number(weight)}; expected 0 or 1")


def _without_thoughts(content: Any, message: dict[str, Any]) -> Any:
    """The content without its parts of thoughts (Mistral's), which go into a field of their own."""
    if not isinstance(content, list):
        return content
    own = [each for each in content if isinstance(each, dict) and each.get("type") == "thinking"]
    inner = [part for each in own for part in _listed_parts(each.get("thinking"))]
    if own:
        message.setdefault(THOUGHTS[0], _content(inner, "thoughts"))
    return [each for each in content if each not in own]


def _listed_parts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [{"type": "text", "text": value}]


def _content(value: Any, what: str) -> str:
    """Text as it stands, or the joined parts of a list of text parts."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return clean_text(value, f"the content of {what}")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = shown_value(part.get("type")) if isinstance(part, dict) else kind_of(part)
            raise BadRow(f"{what} has a part of type {kind}; expected text alone")
    return "".join(clean_text(part.get("text"), f"a part of {what}") for part in value)


def counts(message: Mapping[str, Any]) -> bool:
    """Whether a turn may count in the loss, by its own `weight` and `train`."""
    return bool(message.get("train", True)) and message.get("weight", 1) != 0


def is_empty(message: Mapping[str, Any]) -> bool:
    """Whether an assistant's turn says nothing, so that its end is nothing to be learnt."""
    thoughts = any(str(message.get(name) or "").strip() for name in THOUGHTS)
    return not (message["content"].strip() or message.get("tool_calls") or thoughts)
