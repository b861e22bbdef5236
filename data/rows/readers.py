"""Files as raw rows: JSONL, JSON, CSV, plain text and Parquet, each row with its file and line.

The line formats are read by Python's own `json` and `csv`, one row at a time. `datasets` was tried
for them and is not fit: one bad line fails the whole file without naming the line, CSV text is
turned into numbers and blanks ("007" -> 7.0, "NA" -> nothing), and a machine with a GPU may not
carry it. It reads Parquet here and the hub's data sets in `sources.py`.
Read next: `shapes.py`, which judges the rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import DataError, EnvironmentFailure
from .csv_rows import read_csv
from .raw import MAX_ROW_BYTES, Extent, RawRow, Rejected, Rows, kind_of

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".go", ".rs")
_WRONG_CONTENT = (
    (b"PAR1", "is a Parquet file; name it .parquet"),
    (b"\x1f\x8b", "is compressed by gzip; unpack it first"),
    (b"PK\x03\x04", "is a zip archive; unpack it first"),
    (b"\xff\xfe\0\0", "is UTF-32 text; save it as UTF-8"),
    (b"\0\0\xfe\xff", "is UTF-32 text; save it as UTF-8"),
    (b"\xff\xfe", "is UTF-16 text; save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16 text; save it as UTF-8"),
)
_BLANK = re.compile(r"[ \t\r\n]*")


def read_file(path: Path, *, block: int, extent: Extent | None = None) -> Rows:
    """The rows of one file, by its suffix.

    Args:
        block: characters of plain text in one row.
        extent: told with each row how far the file is read.

    Raises:
        DataError: the file cannot be opened, or is broken beyond its single rows.
    """
    suffix = path.suffix.lower()
    extent = Extent(0) if extent is None else extent
    try:
        if suffix == ".parquet":
            yield from read_parquet(path, extent)
            return
        with path.open("rb") as stream:
            _check_content(stream, path)
            reader = _READERS.get(suffix)
            rows = read_text(stream, str(path), block) if reader is None else reader(stream, str(path))
            with closing(rows):
                for row in rows:
                    extent.read = stream.tell()
                    yield row
                extent.read = stream.tell()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_jsonl(stream: BinaryIO, file: str) -> Rows:
    """One JSON object per line. Only a line feed ends a line: JSON text may hold U+2028."""
    for number, line in _lines(stream):
        if isinstance(line, int):
            reason = f"a line of {line / 1e6:.1f} MB; the limit is {MAX_ROW_BYTES / 1e6:.1f} MB"
            yield Rejected(file, number, reason)
        elif line.strip():
            yield _parse_line(line, file, number)


def read_json(stream: BinaryIO, file: str) -> Rows:
    """A list of objects, one object, or JSON lines under the name .json."""
    text = _decode(stream, file)
    start = _skip(text, 0)
    if start == len(text):
        return
    if text[start] == "[":
        yield from _elements(text, start + 1, file)
        return
    try:
        value = _load(text)
    except (ValueError, RecursionError) as error:
        if not str(error).startswith("Extra data"):
            raise DataError(f"{file}:{_line_of(error)}: not JSON ({_brief(error)})") from error
        stream.seek(0)
        yield from read_jsonl(stream, file)
        return
    yield _object(value, file, 1)


def read_text(stream: BinaryIO, file: str, block: int) -> Rows:
    """Plain text in blocks that end at a line end (or, without one, after `block` characters).

    A line with bytes that are not UTF-8 is rejected, and what its block has before and behind it is used.
    """
    line = 1
    # bytes that are not UTF-8 become surrogates, which the line's own bytes tell from text
    text = TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape")
    try:
        part = text.read(block) + text.readline(block)
        while part:
            following = text.read(block)
            if following:
                following += text.readline(block)
            *cut_off, last = _pieces(part)  # by a bad line behind them
            for at, piece, fault in (*cut_off, last):
                if fault is not None:
                    yield Rejected(file, line + at, fault)
                elif piece.strip():
                    yield RawRow(file, line + at, {"text": piece}, ends=not following and at == last[0])
            line += part.count("\n")
            part = following
    finally:
        text.detach()  # the stream is the caller's


def _pieces(block: str) -> Iterator[tuple[int, str, str | None]]:
    """Lines that follow each other and are UTF-8 as one piece, each other line with what is wrong with it.

    Yields (index of the first line, text, fault); what is behind the last bad line comes last, and may be empty.
    """
    if _not_utf8(block) is None:
        yield 0, block, None
        return
    first, good = 0, ""
    for at, line in enumerate(re.findall(r"[^\n]*\n|[^\n]+", block)):
        fault = _not_utf8(line)
        if fault is None:
            good += line
            continue
        yield first, good, None
        yield at, line, fault
        first, good = at + 1, ""
    yield first, good, None


def _not_utf8(text: str) -> str | None:
    """What is wrong with bytes that were no UTF-8 when they were read; None where all were."""
    if text.isascii():
        return None
    try:
        text.encode(errors="surrogateescape").decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 ({error.reason} at byte {error.start} of the line)"
    return None


def read_parquet(path: Path, extent: Extent) -> Rows:
    """Rows through `datasets`, streamed; `line` is the row's number."""
    content = path.read_bytes() if path.stat().st_size < 12 else _ends(path)
    if not (content.startswith(b"PAR1") and content.endswith(b"PAR1") and len(content) >= 8):
        raise DataError(f"{path}: no complete Parquet file; it is cut off or something else")
    datasets = import_datasets()
    from pyarrow.parquet import read_metadata

    # ArrowInvalid is a ValueError, ArrowNotImplementedError a NotImplementedError
    broken = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, MemoryError)
    number = 0
    try:
        count = read_metadata(path).num_rows
        if not count:  # `datasets` fails on it
            extent.read = extent.size
            return
        rows = datasets.load_dataset("parquet", data_files=_escape(path), split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            extent.read = extent.size * number // count
            yield RawRow(str(path), number, row)
    except (*broken, datasets.exceptions.DatasetsError) as error:
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


_READERS: dict[str, Callable[[BinaryIO, str], Rows]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
}
SUFFIXES = (*_READERS, ".parquet", *TEXT_SUFFIXES)


def reader_version(path: Path) -> tuple[str, ...]:
    """What a file's identity holds beside its content: raised where the same bytes give other rows.

    2: a byte that is not UTF-8 and a stray quote no longer cost what stands behind them.
    3: nor does such a byte cost the block of text around its line.
    """
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson", ".json", ".parquet"):
        return ()
    return ("reader 2",) if suffix in (".csv", ".tsv") else ("reader 3",)


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


def _elements(text: str, at: int, file: str) -> Rows:
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
            raise DataError(f"{file}:{_line_of(error, line)}: not JSON ({_brief(error)})") from error
        yield _object(value, file, line)
        at, first = _skip(text, at), False
        if text[at : at + 1] != ",":
            break
        at += 1
    if text[at : at + 1] != "]" or _skip(text, at + 1) != len(text):
        line += text.count("\n", counted, at)
        raise DataError(f"{file}:{line}: not JSON (the list of rows does not end well)")


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


def _check_content(stream: BinaryIO, path: Path) -> None:
    start = stream.read(4)
    stream.seek(0)
    for magic, reason in _WRONG_CONTENT:
        if start.startswith(magic):
            raise DataError(f"{path}: {reason}")


def _decode(stream: BinaryIO, file: str) -> str:
    content = stream.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, reason = content.count(b"\n", 0, error.start) + 1, error.reason
        at = error.start - (content.rfind(b"\n", 0, error.start) + 1)
        raise DataError(f"{file}:{line}: not UTF-8 ({reason} at byte {at} of the line)") from error


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
