"""Row shapes: which columns mean what, and a row of any shape as one of three records.

Pure functions of plain values; a row that cannot be used raises `BadRow` with the reason, and the
caller knows file and line. Read next: `readers.py` for where rows come from, `encode.py` for where
records go.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from ..config import RowShape

# what one row may hold; more is a file without line ends, or not text at all
MAX_ROW_BYTES = 8 * 2**20

# levels of lists and objects in a tool or a call: more is no schema, and exhausts what walks through it
MAX_DEPTH = 100

# the columns that make a shape, tried in this order
COLUMNS: dict[RowShape, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
    "tokens": ("input_ids",),
}

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
}


class BadRow(Exception):  # noqa: N818 - a verdict on a row, not a failure of the program
    """A row that cannot be used; the message is the reason."""


@dataclass(frozen=True)
class Chat:
    """Messages with roles. `plain`: may be written without a template, prompt then answer."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    plain: bool = False


@dataclass(frozen=True)
class Text:
    """A text that counts whole. `ends` is false for a block that the text goes on behind."""

    text: str
    ends: bool = True


@dataclass(frozen=True)
class Tokens:
    """Token ids made elsewhere, with the mask that came along."""

    ids: list[int]
    in_loss: list[bool] | None = None


Record = Chat | Text | Tokens


def find_shape(columns: Iterable[str]) -> RowShape | None:
    """The first shape all of whose columns are there."""
    present = set(columns)
    return next((shape for shape, need in COLUMNS.items() if present.issuperset(need)), None)


def parse(row: Mapping[str, Any], shape: RowShape) -> Record:
    """A row of a known shape as a record.

    Raises:
        BadRow: a column is missing, has the wrong type, or holds nothing that can be learnt.
    """
    missing = [name for name in COLUMNS[shape] if name not in row]
    if missing:
        raise BadRow(f"column {missing[0]!r} is missing; found {_listed(row)}")
    return _PARSERS[shape](row)


def digest(record: Record) -> int:
    """64 bits of the record's content: rows are held out and duplicates counted by it."""
    # `default` because Parquet hands out dates and bytes inside tool arguments
    content = json.dumps(asdict(record), sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")


def clean_text(value: Any, what: str) -> str:
    """`value` if it is text that a tokenizer can take."""
    if not isinstance(value, str):
        raise BadRow(f"{what} is {kind_of(value)}; expected text")
    if len(value) > MAX_ROW_BYTES:
        raise BadRow(f"{what} has {len(value):,} characters; the limit is {MAX_ROW_BYTES:,}")
    if "\0" in value:
        raise BadRow(f"{what} contains a NUL character")
    _check_inside(value, what)
    return value


def _check_inside(value: Any, what: str, depth: int = 0) -> None:
    """Raise BadRow where texts inside objects and lists are no UTF-8, or these are nested too deeply."""
    if depth > MAX_DEPTH:
        raise BadRow(f"{what} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        for key, each in value.items():
            _check_inside(key, what, depth)
            _check_inside(each, what, depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_inside(each, what, depth + 1)
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRow(
                f"{what} is not valid Unicode at character {error.start} (broken UTF-8, or half of a UTF-16 pair)"
            ) from error


def filled(value: Any, what: str) -> str:
    """`value` if it is text with more in it than blanks."""
    text = clean_text(value, what)
    if not text.strip():
        raise BadRow(f"{what} is empty")
    return text


def instruction_text(row: Mapping[str, Any]) -> str:
    """The user's turn of an instruction row: the instruction, and its input on a new line."""
    instruction = filled(row["instruction"], "instruction")
    given = row.get("input")
    given = "" if given is None else clean_text(given, "input")
    return f"{instruction}\n{given}" if given else instruction


def chat_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """The messages of a `messages` or `conversations` column, roles under our names."""
    value = _from_json(value, column)
    if not isinstance(value, list):
        raise BadRow(f"{column} is {kind_of(value)}; expected a list of messages")
    if not value:
        raise BadRow(f"{column} is empty")
    return [_message(each, f"{column}[{at}]") for at, each in enumerate(value)]


def kind_of(value: Any) -> str:
    """What a value is, in JSON's terms."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "no JSON value")


def shown_names(columns: Iterable[str]) -> str:
    """The first of a row's columns; what cannot be printed stands as its code."""
    shown = [repr(name)[1:-1][:80] for name in islice(columns, 21)]
    if len(shown) > 20:
        shown[20] = "and more"
    return ", ".join(shown) or "none"


def _messages(row: Mapping[str, Any]) -> Chat:
    return Chat(_answered(chat_messages(row["messages"], "messages")), _tools(row))


def _conversations(row: Mapping[str, Any]) -> Chat:
    messages = chat_messages(row["conversations"], "conversations")
    system = row.get("system")
    if system:  # ShareGPT keeps the system prompt in a column of its own
        messages.insert(0, {"role": "system", "content": clean_text(system, "system")})
    return Chat(_answered(messages), _tools(row))


def _prompt_completion(row: Mapping[str, Any]) -> Chat:
    """Two texts, or two lists of messages."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        both = chat_messages(prompt, "prompt") + chat_messages(completion, "completion")
        return Chat(_answered(both), _tools(row))
    return _exchange(filled(prompt, "prompt"), filled(completion, "completion"))


def _instruction(row: Mapping[str, Any]) -> Chat:
    return _exchange(instruction_text(row), filled(row["output"], "output"))


def _exchange(user: str, assistant: str) -> Chat:
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return Chat(turns, plain=True)


def _text(row: Mapping[str, Any]) -> Text:
    return Text(filled(row["text"], "text"))


def _tokens(row: Mapping[str, Any]) -> Tokens:
    """`input_ids`, and which of them count: `loss_mask` (0/1), or `labels` (-100: not)."""
    ids = _whole_numbers(row["input_ids"], "input_ids")
    mask = _given_mask(row, ids)
    attention = row.get("attention_mask")
    if attention is not None:  # padding that was stored is no text
        real = _same_length(_whole_numbers(attention, "attention_mask"), ids, "attention_mask")
        if not set(real) <= {0, 1}:
            raise BadRow("attention_mask holds other values than 0 and 1")
        ids = [number for number, kept in zip(ids, real) if kept]
        mask = None if mask is None else [flag for flag, kept in zip(mask, real) if kept]
    if len(ids) < 2:
        raise BadRow(f"input_ids has {len(ids)} tokens; one cannot be predicted from nothing")
    return Tokens(ids, mask)


def _given_mask(row: Mapping[str, Any], ids: list[int]) -> list[bool] | None:
    if row.get("loss_mask") is not None:
        mask = _whole_numbers(row["loss_mask"], "loss_mask", booleans=True)
        if not set(mask) <= {0, 1}:
            raise BadRow("loss_mask holds other values than 0 and 1")
        return [flag == 1 for flag in _same_length(mask, ids, "loss_mask")]
    if row.get("labels") is not None:
        labels = _same_length(_whole_numbers(row["labels"], "labels"), ids, "labels")
        if any(label not in (-100, number) for label, number in zip(labels, ids)):
            raise BadRow("labels differ from input_ids; expected the same number, or -100")
        return [label != -100 for label in labels]
    return None


_PARSERS: dict[RowShape, Callable[[Mapping[str, Any]], Record]] = {
    "messages": _messages,
    "conversations": _conversations,
    "prompt_completion": _prompt_completion,
    "instruction": _instruction,
    "text": _text,
    "tokens": _tokens,
}


def _message(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRow(f"{what} is {kind_of(value)}; expected an object with role and content")
    message = {key: each for key, each in value.items() if each is not None}
    role = message.pop("role", message.pop("from", None))
    content = message.pop("content", message.pop("value", None))
    role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        shown = "missing" if role is None else _shown(role)
        raise BadRow(f"the role of {what} is {shown}; expected one of {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if content is None and not (role == "assistant" and calls):
        raise BadRow(f"{what} ({role}) has no content")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_object, calls))):
        raise BadRow(f"tool_calls of {what} is {kind_of(calls)}; expected a list of objects")
    for name, each in message.items():
        _check_inside(name, f"a key of {what}")
        _check_inside(each, f"{name!r:.40} of {what}")
    return {"role": role, "content": _content(content, what), **message}


def _content(value: Any, what: str) -> str:
    """Text as it stands, or the joined parts of a list of text parts."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return clean_text(value, f"the content of {what}")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = _shown(part.get("type")) if isinstance(part, dict) else kind_of(part)
            raise BadRow(f"{what} has a part of type {kind}; expected text alone")
    return "".join(clean_text(part.get("text"), f"a part of {what}") for part in value)


def _answered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, if an assistant turn in them has content."""
    spoken = [m["content"] or m.get("tool_calls") for m in messages if m["role"] == "assistant"]
    if not any(spoken):
        raise BadRow(f"{'every' if spoken else 'no'} assistant turn{' is empty' if spoken else ''}")
    return messages


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = _from_json(row.get("tools") or None, "tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(map(_is_object, tools)):
        raise BadRow(f"tools is {kind_of(tools)}; expected a list of objects")
    _check_inside(tools, "tools")
    return tools


def _from_json(value: Any, what: str) -> Any:
    """A nested value; CSV, and some Parquet files, hold it as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{what} is text that is not JSON") from error


def _whole_numbers(value: Any, what: str, *, booleans: bool = False) -> list[int]:
    if not isinstance(value, list):
        raise BadRow(f"{what} is {kind_of(value)}; expected a list of whole numbers")
    for at, each in enumerate(value):
        if not isinstance(each, int) or (isinstance(each, bool) and not booleans):
            raise BadRow(f"{what}[{at}] is {kind_of(each)}; expected a whole number")
    return value


def _same_length(values: list[int], ids: Sequence[int], what: str) -> list[int]:
    if len(values) != len(ids):
        raise BadRow(f"{what} has {len(values)} entries, input_ids {len(ids)}; expected as many")
    return values


def _shown(value: Any) -> str:
    """Text as it stands, of anything else its kind: it may be nested as deeply as it likes."""
    return f"{value!r:.40}" if isinstance(value, str) else kind_of(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(row)[:8])) or "no columns"
