"""CSV and TSV as raw rows, by Python's strict `csv`; a stray quote costs the line it stands in.

Read next: `readers.py`, the other formats.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from io import TextIOWrapper
from typing import Any, BinaryIO, Literal

from ...errors import DataError
from .raw import MAX_ROW_BYTES, RawRow, Rejected, Rows

SWALLOWS = "one row by their quotes, but most lines between have, by themselves, as many fields as the header has"
"""Why a record of many lines is left out."""


def read_csv(stream: BinaryIO, file: str) -> Rows:
    """Comma (or, for .tsv, tab) separated text with a header; every value stays text.

    Raises:
        DataError: the header is no CSV, or has an empty or a repeated name.
    """
    csv.field_size_limit(MAX_ROW_BYTES)  # its default, 128 KiB, is less than a long document
    # bytes that are not UTF-8 become surrogates here and are refused by row in `shapes`
    text = TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        lines, delimiter = _Lines(text), "\t" if file.lower().endswith(".tsv") else ","
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        header = _header(reader, file)
        while header and not lines.at_end():
            line = lines.begin_row()
            try:
                fields = next(reader)
            except csv.Error as error:
                lines.go_back()
                yield Rejected(file, line, f"not CSV ({error})")
                continue
            reason = lines.fault(fields, delimiter, len(header))
            if reason is None:
                yield RawRow(file, line, dict(zip(header, fields)))
            elif fields:
                yield Rejected(file, line, reason)
                inside = f"inside the row that begins in line {line}: {reason}"
                lost = lines.rows_inside(delimiter, len(header))
                yield from (Rejected(file, line + at, inside) for at in lost)
    finally:
        text.detach()  # the stream is the caller's


class _Lines:
    """Lines for the CSV reader, which can be read again from the second one of a row on."""

    def __init__(self, stream: Iterator[str]) -> None:
        self._stream = stream
        self._again: deque[str] = deque()
        self._row: list[str] = []
        self._number = 0  # of the last line handed out

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._stream)
        self._number += 1
        self._row.append(line)
        return line

    def at_end(self) -> bool:
        """Whether no line is left."""
        if not self._again:
            self._again.extend(line for line in [next(self._stream, "")] if line)
        return not self._again

    def begin_row(self) -> int:
        """The number of the line where the next row begins."""
        self._row.clear()
        return self._number + 1

    def go_back(self) -> None:
        """Go on behind the first line of a row that is no CSV.

        A quote that opens by mistake closes at the next one, lines below or at the end of the
        file. The lines in between are rows of their own, and only its own line is lost.
        """
        self._number -= len(self._row) - 1
        self._again.extendleft(reversed(self._row[1:]))

    def fault(self, fields: list[str], delimiter: str, expected: int) -> str | None:
        """Why the row just read is none; None if it is one."""
        if len(fields) != expected:
            return f"{len(fields)} fields; the header has {expected}"
        if self._swallows_rows(delimiter, expected):
            return f"lines {self._number - len(self._row) + 1} to {self._number} are {SWALLOWS}"
        return None

    def _swallows_rows(self, delimiter: str, fields: int) -> bool:
        """Whether a quote that opened by mistake, and closed in front of a delimiter, made one row of many.

        Then most lines between are rows by themselves, and so is the last. Of one column every line
        of a text would be a row: that proves nothing.
        """
        inner = [line for line in self._row[1:-1] if line.strip()]
        if fields < 2 or len(inner) < 2:
            return False
        rows = sum(_count(line, delimiter) == fields for line in inner)
        last = {_count(self._row[-1], delimiter), _count(self._row[-1], delimiter, csv.QUOTE_NONE)}
        return 2 * rows > len(inner) and fields in last

    def rows_inside(self, delimiter: str, fields: int) -> list[int]:
        """Lines of the row just read, counted from its first, that would be rows by themselves.

        Nobody can say whether they were: not read again, or texts over several lines were taken
        for rows, and not forgotten either.
        """
        return [at for at, line in enumerate(self._row) if at and _count(line, delimiter) == fields]


def _count(line: str, delimiter: str, quoting: Literal[0, 3] = csv.QUOTE_MINIMAL) -> int:
    """Fields of a line by itself; none where it is no CSV."""
    try:
        return len(next(csv.reader([line], delimiter=delimiter, quoting=quoting, strict=True)))
    except csv.Error:
        return 0


def _header(reader: Any, file: str) -> list[str]:
    """The names of the first line that is not blank."""
    try:
        header = [name.strip() for name in next((fields for fields in reader if fields), [])]
    except csv.Error as error:
        raise DataError(f"{file}:1: not CSV ({error})") from error
    if "" in header or len(set(header)) != len(header):
        raise DataError(f"{file}:{reader.line_num}: the header {header!r:.300} has an empty or a repeated name")
    return header
