"""Row shapes: which columns mean what, and a row of any shape as one of three records.

Pure functions of plain values; a row that cannot be used raises `BadRow` with the reason, and the
caller knows file and line. Read next: `chats/message.py` for one message, `readers.py` for where rows come
from, `encode.py` for where records go.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from ..config import RowShape
from .chats.calls import as_tools, has_older_calls, loose_arguments
from .chats.message import chat_messages, is_empty
from .chats.written import IDS, Written, read_written
from .raw import BadRow, as_flag, check_inside, clean_text, filled, from_json, kind_of

# the columns that make a shape, tried in this order
COLUMNS: dict[RowShape, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
    "tokens": ("input_ids",),
}


@dataclass(frozen=True)
class Chat:
    """Messages with roles. `plain`: may be written without a template, prompt then answer."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    plain: bool = False
    written: Written | None = None
    """The token ids of prompts and answers, where whoever wrote the answers has kept them."""
    loose: int = 0
    """Calls whose arguments are text that is no object."""
    asked: int = 0
    """Turns at the beginning that are a prompt, the answers among them too."""
    is_fuller: bool = False
    """Whether earlier versions read less of it: a system text beside it, calls under older names or as text."""


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


SYSTEM = ("system", "system_prompt")
"""Columns beside any chat that hold its system turn."""
_BESIDE = frozenset({*SYSTEM, "tools", "functions", IDS})
_READ: dict[RowShape, frozenset[str]] = {
    "messages": _BESIDE,
    "conversations": _BESIDE,
    "prompt_completion": _BESIDE | {"ended"},
    "instruction": frozenset({*SYSTEM, "input"}),
    "text": frozenset(),
    "tokens": frozenset({"loss_mask", "labels", "attention_mask"}),
}


def unread(row: Mapping[str, Any], shape: RowShape) -> list[str]:
    """The columns of a row that hold something, and that nothing reads in a row of this shape."""
    known = _READ[shape].union(COLUMNS[shape])
    return [name for name, value in row.items() if name not in known and value is not None]


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
    held = asdict(record)
    if isinstance(record, Chat):  # equal texts stay together, whatever ids they were written in
        held = {name: held[name] for name in ("messages", "tools", "plain")}
    # `default` because Parquet hands out dates and bytes inside tool arguments
    content = json.dumps(held, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")


def instruction_text(row: Mapping[str, Any]) -> str:
    """The user's turn of an instruction row: the instruction, and its input on a new line."""
    instruction = filled(row["instruction"], "instruction")
    given = row.get("input")
    given = "" if given is None else clean_text(given, "input")
    return f"{instruction}\n{given}" if given else instruction


def shown_names(columns: Iterable[str]) -> str:
    """The first of a row's columns; what cannot be printed stands as its code."""
    shown = [repr(name)[1:-1][:80] for name in islice(columns, 21)]
    if len(shown) > 20:
        shown[20] = "and more"
    return ", ".join(shown) or "none"


def system_text(row: Mapping[str, Any]) -> str | None:
    """The system turn that a column of its own holds."""
    found = {clean_text(row[name], name) for name in SYSTEM if row.get(name)}
    if len(found) > 1:
        raise BadRow("system and system_prompt are different texts; expected one of them")
    return next(iter(found), None)


def with_system(messages: list[dict[str, Any]], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages behind the system turn of the row's own column, unless they begin with that text."""
    system = system_text(row)
    if system is None or (messages[0]["role"] in ("system", "developer") and messages[0]["content"] == system):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _messages(row: Mapping[str, Any]) -> Chat:
    return _chat(row, "messages")


def _conversations(row: Mapping[str, Any]) -> Chat:
    return _chat(row, "conversations")


def _chat(row: Mapping[str, Any], *columns: str) -> Chat:
    messages = [each for column in columns for each in chat_messages(row[column], column)]
    answered = _answered(with_system(messages, row))
    given = [each for column in columns for each in from_json(row[column], column)]
    more = [
        name for name in (*SYSTEM, "functions") if row.get(name) and (name, *columns) != ("system", "conversations")
    ]
    tools = tools_of(row)
    fuller = bool(more) or tools != (from_json(row.get("tools"), "tools") or None) or has_older_calls(given)
    return Chat(answered, tools, written=read_written(row.get(IDS)), loose=loose_arguments(answered), is_fuller=fuller)


def _prompt_completion(row: Mapping[str, Any]) -> Chat:
    """Two texts, or two lists of messages."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        return _asked(_chat(row, "prompt", "completion"), row)
    return _exchange(filled(prompt, "prompt"), filled(completion, "completion"), row)


def _asked(chat: Chat, row: Mapping[str, Any]) -> Chat:
    """A chat of which the turns in front of the completion are a prompt."""
    count = len(chat.messages) - len(from_json(row["completion"], "completion"))
    if chat.messages[-1]["role"] == "assistant":
        chat.messages[-1].update(_ended(row))
    is_answered = any(each["role"] == "assistant" for each in chat.messages[:count])
    return replace(chat, asked=count) if is_answered else chat


def _instruction(row: Mapping[str, Any]) -> Chat:
    return _exchange(instruction_text(row), filled(row["output"], "output"), row)


def _exchange(user: str, assistant: str, row: Mapping[str, Any]) -> Chat:
    """An exchange of texts; one with a system text or tools is a chat like others."""
    answer: dict[str, Any] = {"role": "assistant", "content": assistant, **_ended(row)}
    turns = with_system([{"role": "user", "content": user}, answer], row)
    tools = tools_of(row)
    fuller = tools is not None or len(turns) > 2
    return Chat(turns, tools, plain=tools is None, written=read_written(row.get(IDS)), is_fuller=fuller)


def _ended(row: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the row's answer came to its end, as a mark of the turn, where the row says it."""
    return {} if row.get("ended") is None else {"ended": as_flag(row["ended"], "ended")}


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


def _answered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, if an assistant turn in them says something, be it thoughts alone."""
    spoken = [m["content"] or not is_empty(m) for m in messages if m["role"] == "assistant"]
    if not any(spoken):
        raise BadRow(f"{'every' if spoken else 'no'} assistant turn{' is empty' if spoken else ''}")
    return messages


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of a row, under today's name or the older one."""
    name = "tools" if row.get("tools") else "functions"
    tools = as_tools(from_json(row.get(name) or None, name), name)
    if tools is not None:
        check_inside(tools, name)
    return tools


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


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(row)[:8])) or "no columns"
