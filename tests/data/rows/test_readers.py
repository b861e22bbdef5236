"""Every row, good or bad, is named by the line where it begins, whatever stands in front of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from draftsmith.data.rows.readers import RawRow, Rejected, read_file
from draftsmith.data.rows.sources import FileSource

GOOD = json.dumps({"text": "a"})
WIDE = json.dumps({"text": "a", "of": ["b"]}, indent=1)  # one row in six lines

# name, suffix, content, (line, whether it is read) of every row
FILES: list[tuple[str, str, str, list[tuple[int, bool]]]] = [
    ("rows", ".jsonl", f"{GOOD}\n{{bad\n{GOOD}\n", [(1, True), (2, False), (3, True)]),
    ("blank lines", ".jsonl", f"\n \n{GOOD}\n\n\n{{bad\n\t\n17", [(3, True), (6, False), (8, False)]),
    ("line ends of Windows", ".jsonl", f"{GOOD}\r\n\r\n{{bad\r\n", [(1, True), (3, False)]),
    ("a mark of byte order", ".jsonl", f"\ufeff{GOOD}\n\n{{bad\n", [(1, True), (3, False)]),
    (
        "other line ends inside",
        ".jsonl",
        f'{{"text": "a\u2028b\u0085c"}}\n\n{{bad\n{GOOD}',
        [(1, True), (3, False), (4, True)],
    ),
    ("lines under another name", ".json", f"{GOOD}\n\n{GOOD}\n17\n", [(1, True), (3, True), (4, False)]),
    ("a list", ".json", f"[\n\n{WIDE},\n17\n,\n\n{GOOD}]", [(3, True), (9, False), (12, True)]),
    ("fields", ".csv", "text,of\na,b\nc\nd,e\n", [(2, True), (3, False), (4, True)]),
    ("blank lines", ".csv", "text,of\n\n\na,b\n\nc\n\nd,e\n", [(4, True), (6, False), (8, True)]),
    ("quoted line ends", ".csv", 'text,of\n"a\nb\n\nc",d\n"e\nf"\ng,h\n', [(2, True), (6, False), (8, True)]),
    ("a header of two lines", ".csv", '"te\nxt",of\na,b\nc\n', [(3, True), (4, False)]),
    ("line ends of Windows", ".csv", 'text,of\r\n"a\r\nb",c\r\n\r\nd\r\n', [(2, True), (5, False)]),
    (
        "a quote that is never closed",
        ".csv",
        'text,of\na,b\n"c,d\ne,f\n\ng,h\n',
        [(2, True), (3, False), (4, True), (6, True)],
    ),
    ("tabs", ".tsv", 'text\tof\n"a\nb"\tc\n\nd\n', [(2, True), (5, False)]),
]


@pytest.mark.parametrize(("name", "suffix", "content", "rows"), FILES, ids=[f"{f[0]} {f[1]}" for f in FILES])
def test_a_row_is_named_by_the_line_where_it_begins(
    name: str, suffix: str, content: str, rows: list[tuple[int, bool]], tmp_path: Path
) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content.encode())
    read = list(read_file(path, block=100))
    assert [(row.line, isinstance(row, RawRow)) for row in read] == rows
    assert {row.file for row in read} == {str(path)}
    assert all(row.reason for row in read if isinstance(row, Rejected))


def test_a_block_of_text_is_named_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    lines = [f"line {number}" for number in range(1, 30)]
    path.write_text("\n\n\n" + "\n".join(lines) + "\n")
    rows = [row for row in read_file(path, block=20) if isinstance(row, RawRow)]
    assert len(rows) > 5
    whole = path.read_text().split("\n")
    for row in rows:
        first = row.columns["text"].split("\n")[0]
        assert whole[row.line - 1] == first


def test_what_a_bad_row_takes_with_it_is_named(tmp_path: Path) -> None:
    """A quote that closes far below cannot be told from text over many lines."""
    path = tmp_path / "rows.csv"
    path.write_text('text,of\na,b\n"c,d\ne,f\ng,"h\ni,j\n')
    rows = list(read_file(path, block=100))
    assert [row.line for row in rows] == [2, 3, 6]
    assert isinstance(rows[1], Rejected)
    assert rows[1].reason.endswith("; lost up to line 5")


def test_a_row_that_is_too_wide_costs_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.data.rows.readers.MAX_ROW_BYTES", 1000)
    path = tmp_path / "rows.csv"
    path.write_text('text,of\na,"b\n' + "c,d\n" * 500)
    rows = list(read_file(path, block=100))
    assert [row.line for row in rows] == list(range(2, 503))
    assert [isinstance(row, RawRow) for row in rows] == [False] + [True] * 500


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_byte_that_is_not_utf8_costs_its_own_block(end: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    lines = [f"line {number}: caf\u00e9 \u2028{end}".encode() for number in range(1, 200)]
    lines[99] = b"line 100: caf\xe9 is latin-1" + end.encode()
    path.write_bytes(b"".join(lines))
    rows = list(read_file(path, block=60))
    bad = [row for row in rows if isinstance(row, Rejected)]
    assert [(row.line, row.reason) for row in bad] == [
        (100, "not UTF-8 (invalid continuation byte at byte 13 of the line)")
    ]
    text = "".join(row.columns["text"] for row in rows if isinstance(row, RawRow))
    missing = {f"line {number}:" for number in range(1, 200)} - {
        f"line {n}:" for n in range(1, 200) if f"line {n}:" in text
    }
    assert "line 100:" in missing
    assert len(missing) < 6, "the lines of one block"


@pytest.mark.parametrize("suffix", [".txt", ".py", ".csv", ".tsv", ".jsonl", ".json"])
def test_files_whose_reading_has_changed_are_others(suffix: str, tmp_path: Path) -> None:
    """So neither a cache nor an unfinished generation of the first release is taken for what is read now."""
    path = tmp_path / f"rows{suffix}"
    path.write_text("text\na\n")
    first_release = hashlib.sha256()
    for part in (str(path).encode(), hashlib.sha256(b"text\na\n").hexdigest().encode()):
        first_release.update(len(part).to_bytes(8, "big") + part)
    same = FileSource("rows", (path,), 100).identity() == first_release.hexdigest()
    assert same == suffix.startswith(".json")
