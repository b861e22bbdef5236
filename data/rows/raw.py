"""What a reader hands out: raw rows, rows that are left out and why, and how far a file was read.

Read next: `readers.py`, which fills them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple


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
