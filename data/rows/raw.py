"""What a reader hands out: raw rows, rows that are left out and why, how far a file was read; and checks of values.

Read next: `readers.py`, which fills them.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

# what one row may hold; more is a file without line ends, or not text at all
MAX_ROW_BYTES = 8 * 2**20

# levels of lists and objects in a tool or a call: more is no schema, and exhausts what walks through it
MAX_DEPTH = 100


class BadRow(Exception):  # noqa: N818 - a verdict on a row, not a failure of the program
    """A row that cannot be used; the message is the reason."""


class RawRow(NamedTuple):
    """Columns of one row, and where it begins (lines are counted from 1, Parquet rows too)."""

    file: str
    line: int
    columns: dict[str, Any]
    ends: bool = True


class Rejected(NamedTuple):
    """A row that is left out, and why."""

    file: str
    line: int
    reason: str


Rows = Generator[RawRow | Rejected, None, None]


@dataclass
class Extent:
    """Bytes of a file, and how many of them were read."""

    size: int
    read: int = 0


Extents = dict[str, Extent]
"""File -> how far it was read; a source lists all of its files before the first row."""


def kind_of(value: Any) -> str:
    """What a value is, in JSON's terms."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "no JSON value")


def is_object(value: Any) -> bool:
    """Whether a value is a JSON object."""
    return isinstance(value, dict)


def clean_text(value: Any, what: str) -> str:
    """`value` if it is text that a tokenizer can take."""
    if not isinstance(value, str):
        raise BadRow(f"{what} is {kind_of(value)}; expected text")
    if len(value) > MAX_ROW_BYTES:
        raise BadRow(f"{what} has {len(value):,} characters; the limit is {MAX_ROW_BYTES:,}")
    if "\0" in value:
        raise BadRow(f"{what} contains a NUL character")
    check_inside(value, what)
    return value


def check_inside(value: Any, what: str, depth: int = 0) -> None:
    """Raise BadRow where texts inside objects and lists are no UTF-8, or these are nested too deeply."""
    if depth > MAX_DEPTH:
        raise BadRow(f"{what} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        for key, each in value.items():
            check_inside(key, what, depth)
            check_inside(each, what, depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            check_inside(each, what, depth + 1)
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


def as_flag(value: Any, what: str) -> bool:
    """`value` if it says yes or no."""
    if not isinstance(value, bool):
        raise BadRow(f"{what} is {kind_of(value)}; expected true or false")
    return value


def from_json(value: Any, what: str) -> Any:
    """A nested value; CSV, and some Parquet files, hold it as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{what} is text that is not JSON") from error


def shown_value(value: Any) -> str:
    """Text as it stands, of anything else its kind: it may be nested as deeply as it likes."""
    return f"{value!r:.40}" if isinstance(value, str) else kind_of(value)


def shown_number(value: Any) -> str:
    """A number as people write it, of anything else its kind."""
    return f"{value:g}" if isinstance(value, int | float) else kind_of(value)
