"""Files as raw rows: JSONL, JSON, CSV, plain text and Parquet, each row with its file and line.

The line formats are read by Python's own `json` and `csv`, one row at a time. `datasets` was tried
for them and is not fit: one bad line fails the whole file without naming the line, CSV text is
turned into numbers and blanks ("007" -> 7.0, "NA" -> nothing), and a machine with a GPU may not
carry it. It reads Parquet here and the hub's data sets in `sources.py`.
Read next: `shapes.py`, which judges the rows.
"""

from __future__ import annotations

import csv
import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...errors import DataError, EnvironmentFailure
from .shapes import MAX_ROW_BYTES, kind_of


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


Rows = Iterator[RawRow | Rejected]

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".go", ".rs")
_WRONG_CONTENT = (
    (b"PAR1", "is a Parquet file; name it .parquet"),
    (b"\x1f\x8b", "is compressed by gzip; unpack it first"),
    (b"PK\x03\x04", "is a zip archive; unpack it first"),
    (b"\xff\xfe", "is UTF-16 text; save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16 text; save it as UTF-8"),
)
_BLANK = re.compile(r"[ \t\r\n]*")


def read_file(path: Path, *, block: int) -> Rows:
    """The rows of one file, by its suffix. `block`: characters of plain text in one row.

    Raises:
        DataError: the file cannot be opened, or is broken beyond its single rows.
    """
    reader = _READERS.get(path.suffix.lower())
    try:
        if path.suffix.lower() != ".parquet":
            _check_content(path)
        yield from reader(path) if reader else read_text(path, block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_jsonl(path: Path) -> Rows:
    """One JSON object per line. Only a line feed ends a line: JSON text may hold U+2028."""
    with path.open("rb") as stream:
        for number, line in _lines(stream):
            if isinstance(line, int):
                reason = f"a line of {line / 1e6:.1f} MB; the limit is {MAX_ROW_BYTES / 1e6:.1f} MB"
                yield Rejected(str(path), number, reason)
            elif line.strip():
                yield _parse_line(line, str(path), number)


def read_json(path: Path) -> Rows:
    """A list of objects, one object, or JSON lines under the name .json."""
    text = _decode(path)
    start = _skip(text, 0)
    if start == len(text):
        return
    if text[start] == "[":
        yield from _elements(text, start + 1, path)
        return
    try:
        value = _load(text)
    except (ValueError, RecursionError) as error:
        if not str(error).startswith("Extra data"):
            raise DataError(f"{path}:{_line_of(error)}: not JSON ({_brief(error)})") from error
        yield from read_jsonl(path)
        return
    yield _object(value, str(path), 1)


def read_csv(path: Path) -> Rows:
    """Comma (or, for .tsv, tab) separated text with a header; every value stays text."""
    csv.field_size_limit(MAX_ROW_BYTES)  # its default, 128 KiB, is less than a long document
    # bytes that are not UTF-8 become surrogates here and are refused by row in `shapes`
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        lines = _Lines(stream)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        header = _header(reader, path)
        while header:
            line = lines.begin_row()
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Rejected(str(path), line, f"not CSV ({error}){lines.after_error(str(error))}")
                continue
            if len(fields) == len(header):
                yield RawRow(str(path), line, dict(zip(header, fields)))
            elif fields:
                reason = f"{len(fields)} fields; the header has {len(header)}"
                yield Rejected(str(path), line, reason)


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

    def begin_row(self) -> int:
        """The number of the line where the next row begins."""
        self._row.clear()
        return self._number + 1

    def after_error(self, error: str) -> str:
        """Go on behind a row that is no CSV; returns what is lost with it, for the message.

        A quote that is never closed runs to the end of the file, or of what a field may hold:
        only its own line is lost then, and the next line begins a row.
        """
        if error.startswith(("unexpected end of data", "field larger")):
            self._number -= len(self._row) - 1
            self._again.extendleft(reversed(self._row[1:]))
            return ""
        return f"; lost up to line {self._number}" if len(self._row) > 1 else ""


def read_text(path: Path, block: int) -> Rows:
    """Plain text in blocks that end at a line end (or, without one, after `block` characters).

    A block with bytes that are not UTF-8 is rejected, and no other one with it.
    """
    line = 1
    # bytes that are not UTF-8 become surrogates, which the block's own bytes tell from text
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as stream:
        part = stream.read(block) + stream.readline(block)
        while part:
            following = stream.read(block)
            if following:
                following += stream.readline(block)
            if part.strip():
                bad = _bad_line(part)
                if bad is None:
                    yield RawRow(str(path), line, {"text": part}, ends=not following)
                else:
                    yield Rejected(str(path), line + bad[0], bad[1])
            line += part.count("\n")
            part = following


def _bad_line(text: str) -> tuple[int, str] | None:
    """Index and reason of the first line whose bytes were not UTF-8 when they were read."""
    if text.isascii():
        return None
    content = text.encode(errors="surrogateescape")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        before = content[: error.start]
        at = error.start - (before.rfind(b"\n") + 1)
        return before.count(b"\n"), f"not UTF-8 ({error.reason} at byte {at} of the line)"
    return None


def read_parquet(path: Path) -> Rows:
    """Rows through `datasets`, streamed; `line` is the row's number."""
    content = path.read_bytes() if path.stat().st_size < 12 else _ends(path)
    if not (content.startswith(b"PAR1") and content.endswith(b"PAR1") and len(content) >= 8):
        raise DataError(f"{path}: no complete Parquet file; it is cut off or something else")
    datasets = import_datasets()
    broken = (OSError, ValueError, TypeError, NotImplementedError, datasets.exceptions.DatasetsError)
    number = 0
    try:
        rows = datasets.load_dataset("parquet", data_files=_escape(path), split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield RawRow(str(path), number, row)
    except broken as error:
        raise DataError(
            f"{path}: broken Parquet behind row {number} ({_brief(error)}); write the file anew"
        ) from error


def import_datasets() -> Any:
    """The `datasets` package, which a machine that trains on JSONL can do without."""
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentFailure(
            "Parquet files and hub data sets need the package `datasets`: pip install datasets"
        ) from error
    return datasets


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}
SUFFIXES = (*_READERS, *TEXT_SUFFIXES)


def reader_version(path: Path) -> tuple[str, ...]:
    """What a file's identity holds beside its content: raised where the same bytes give other rows.

    2: a byte that is not UTF-8 and a quote that is never closed no longer cost the rest of the file.
    """
    return () if path.suffix.lower() in (".jsonl", ".ndjson", ".json", ".parquet") else ("reader 2",)


def _ends(path: Path) -> bytes:
    with path.open("rb") as stream:
        start = stream.read(4)
        stream.seek(-4, 2)
        return start + stream.read(4)


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | int]]:
    """Number and bytes of each line; of a line over the limit only its length, never its bytes."""
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) <= MAX_ROW_BYTES or line.endswith(b"\n"):
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            continue
        length = len(line)
        while (more := stream.readline(MAX_ROW_BYTES)) and not more.endswith(b"\n"):
            length += len(more)
        yield number, length + len(more)


def _parse_line(line: bytes, file: str, number: int) -> RawRow | Rejected:
    try:
        return _object(_load(line.decode()), file, number)
    except UnicodeDecodeError as error:
        return Rejected(file, number, f"not UTF-8 ({error.reason} at byte {error.start})")
    except (ValueError, RecursionError) as error:
        return Rejected(file, number, f"not JSON ({_brief(error)})")


def _object(value: Any, file: str, number: int) -> RawRow | Rejected:
    if isinstance(value, dict):
        return RawRow(file, number, value)
    return Rejected(file, number, f"found {kind_of(value)}; expected an object")


def _elements(text: str, at: int, path: Path) -> Rows:
    """The elements of a list that opens before `at`, decoded one by one to know their lines."""
    decoder = json.JSONDecoder(object_pairs_hook=_once)
    line, counted, first = 1, 0, True
    while True:
        at = _skip(text, at)
        line, counted = line + text.count("\n", counted, at), at
        if first and text[at : at + 1] == "]":
            break
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{_line_of(error, line)}: not JSON ({_brief(error)})") from error
        yield _object(value, str(path), line)
        at, first = _skip(text, at), False
        if text[at : at + 1] != ",":
            break
        at += 1
    if text[at : at + 1] != "]" or _skip(text, at + 1) != len(text):
        line += text.count("\n", counted, at)
        raise DataError(f"{path}:{line}: not JSON (the list of rows does not end well)")


def _load(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a key given twice would silently lose the first value."""
    columns = dict(pairs)
    if len(columns) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r:.40} is there twice")
    return columns


def _header(reader: Any, path: Path) -> list[str]:
    try:
        header = [name.strip() for name in next(reader, [])]
    except csv.Error as error:
        raise DataError(f"{path}:1: not CSV ({error})") from error
    if "" in header or len(set(header)) != len(header):
        raise DataError(f"{path}:1: the header {header} has an empty or a repeated name")
    return header


def _check_content(path: Path) -> None:
    with path.open("rb") as stream:
        start = stream.read(4)
    for magic, reason in _WRONG_CONTENT:
        if start.startswith(magic):
            raise DataError(f"{path}: {reason}")


def _decode(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line, reason = _not_utf8(path, error)
        raise DataError(f"{path}:{line}: {reason}") from error


def _not_utf8(path: Path, error: UnicodeDecodeError) -> tuple[int, str]:
    """Line and reason of the first bytes that are no UTF-8; `error` knows only its own chunk."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode()
            except UnicodeDecodeError as inside:
                return number, f"not UTF-8 ({inside.reason} at byte {inside.start} of the line)"
    return 1, f"not UTF-8 ({error.reason})"


def _skip(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return blank.end() if blank else at


def _line_of(error: Exception, default: int = 1) -> int:
    return error.lineno if isinstance(error, json.JSONDecodeError) else default


def _brief(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    text = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return (text.splitlines() or [type(error).__name__])[0][:200]


def _escape(path: Path) -> str:
    """The path with glob characters quoted: `datasets` reads data_files as patterns."""
    return re.sub(r"([\[\]*?])", r"[\1]", str(path))
