"""Every row, good or bad, is named by the line where it begins, whatever stands in front of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from draftsmith.data.rows import readers
from draftsmith.data.rows.raw import Extent, RawRow, Rejected
from draftsmith.data.rows.readers import read_file
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


def test_a_stray_quote_that_closes_below_costs_its_own_line(tmp_path: Path) -> None:
    """The lines up to the next quote are rows of their own."""
    path = tmp_path / "rows.csv"
    lines = [f"{number},of" for number in range(500)]
    lines[150], lines[400] = '"150,of', '400,"of"'
    path.write_text("text,of\n" + "\n".join(lines) + "\n")
    rows = list(read_file(path, block=100))
    assert [row.line for row in rows] == list(range(2, 502))
    assert [row.line for row in rows if isinstance(row, Rejected)] == [152]


def test_rows_inside_a_row_of_wrong_length_are_counted(tmp_path: Path) -> None:
    """A quote opened by mistake and closed where a field may end: nobody can tell it from a text over lines."""
    path = tmp_path / "rows.csv"
    path.write_text('text,of\na,b\n"c,d\ne,f\ng,h\ni\n"\nj,k\n')
    rows = list(read_file(path, block=100))
    assert [(row.line, isinstance(row, RawRow)) for row in rows] == [
        (2, True),
        (3, False),
        (4, False),
        (5, False),
        (8, True),
    ]
    assert isinstance(rows[2], Rejected)
    assert rows[2].reason == "inside the row that begins in line 3: 1 fields; the header has 2"


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("last", ['size 5",of', 'size 5","of"', '399,"'])
def test_rows_between_two_stray_quotes_are_not_one_row(last: str, suffix: str, tmp_path: Path) -> None:
    """The second closes in front of a delimiter, and the record has as many fields as the header."""
    path = tmp_path / f"rows{suffix}"
    lines = [f"{number},of" for number in range(500)]
    lines[150], lines[400] = '150,"of' if last.endswith(',"') else '"150,of', last
    lines[200] = ""
    path.write_text("\n".join(["text,of", *lines, ""]).replace(",", "\t" if suffix == ".tsv" else ","))
    rows = list(read_file(path, block=100))
    closes = [402] * (last != '399,"')  # which by itself is no CSV, so no row that was lost
    lost = [row for row in rows if isinstance(row, Rejected)]
    assert [row.line for row in lost] == [152, *(number for number in range(153, 402) if number != 202), *closes]
    assert lost[0].reason.startswith("lines 152 to 402 are one row by their quotes")
    assert [row.line for row in rows if isinstance(row, RawRow)] == [*range(2, 152), *range(403, 502)]


@pytest.mark.parametrize(
    "content",
    [
        'text\n"one\ntwo\nthree\nfour"\n',  # of one column, every line would be a row
        'text,of\n"one\ntwo\nthree, and\nfour",of\n',
        'text,of\n"one\ntwo, or\n\nfour",of\n',
        'text,of\none,"f(\n  a, b\n  c, d\n)"\n',  # no row ends here, so none begins above
        'text,of,by\n"Dear you,\none, two\nthree, four\nfive, six\n",of,by\n',
    ],
)
def test_a_text_over_several_lines_stays_one_row(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    (row,) = read_file(path, block=100)
    assert isinstance(row, RawRow)
    assert row.columns["text"].count("\n") + row.columns.get("of", "").count("\n") == content.count("\n") - 2


@pytest.mark.parametrize("blank", ["\n", "\n\n", "\r\n"])
def test_blank_lines_before_a_header_hide_no_row(blank: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(blank + "text,of\na,b\n")
    assert [(row.line, isinstance(row, RawRow)) for row in read_file(path, block=100)] == [
        (2 + blank.count("\n"), True)
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".txt", ".parquet"])
def test_bytes_read_are_told(suffix: str, tmp_path: Path) -> None:
    """All of a file when all rows were read, bad ones too; less when reading ended before."""
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        from datasets import Dataset

        Dataset.from_list([{"text": str(number)} for number in range(2000)]).to_parquet(path)
    else:
        rows = [GOOD] * 3000 + (["{bad", "caf\xe9"] if suffix == ".jsonl" else [GOOD])
        whole = "[" + ",\n".join(rows) + "]" if suffix == ".json" else "text\n" + "x\n" * 30000
        path.write_bytes(("\n".join(rows) if suffix == ".jsonl" else whole).encode("latin-1"))
    size = path.stat().st_size
    extent = Extent(size)
    for row in read_file(path, block=100, extent=extent):
        assert 0 < extent.read <= size
        if row.line == 3:
            assert extent.read < size or suffix == ".json"  # which is read whole
    assert extent.read == size


def test_a_row_that_is_too_wide_costs_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.data.rows.readers.MAX_ROW_BYTES", 1000)
    path = tmp_path / "rows.csv"
    path.write_text('text,of\na,"b\n' + "c,d\n" * 500)
    rows = list(read_file(path, block=100))
    assert [row.line for row in rows] == list(range(2, 503))
    assert [isinstance(row, RawRow) for row in rows] == [False] + [True] * 500


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bad", [(100,), (1, 2), (1, 100, 101, 103, 199)])
def test_a_byte_that_is_not_utf8_costs_its_own_line(bad: tuple[int, ...], end: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    lines = [f"line {number}: caf\u00e9 \u2028{end}".encode() for number in range(1, 200)]
    for number in bad:
        lines[number - 1] = f"line {number}: ".encode().ljust(10) + b"caf\xe9 is latin-1" + end.encode()
    path.write_bytes(b"".join(lines))
    rows = list(read_file(path, block=200))
    lost = [row for row in rows if isinstance(row, Rejected)]
    assert [(row.line, row.reason) for row in lost] == [
        (number, f"not UTF-8 (invalid continuation byte at byte {max(10, len(f'line {number}: ')) + 3} of the line)")
        for number in bad
    ]
    used = [row for row in rows if isinstance(row, RawRow)]
    text = [line for row in used for line in row.columns["text"].rstrip("\n").split("\n")]
    assert text == [f"line {number}: café \u2028" for number in range(1, 200) if number not in bad]
    for row in used:
        assert row.columns["text"].startswith(f"line {row.line}: "), "named by its first line"
        assert not any(f"line {number}:" in row.columns["text"] for number in bad)
    assert [row.line for row in used if row.ends] == ([] if 199 in bad else [used[-1].line])


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


@pytest.mark.parametrize("behind", ["", "\n", f"\n{GOOD}\n"])
@pytest.mark.parametrize(("length", "said"), [(1_000_000, None), (1_000_001, "1.0"), (2_649_000, "2.6")])
def test_a_line_that_is_too_long_is_told_with_its_length(
    length: int, said: str | None, behind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line end does not count, and the next line is read."""
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", 1_000_000)
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "{"a" * (length - 12)}"}}' + behind)
    first, *others = read_file(path, block=200)
    if said is None:
        assert isinstance(first, RawRow)
    else:
        assert isinstance(first, Rejected)
        assert first.reason == f"a line of {said} MB; the limit is 1.0 MB"
    assert [each.line for each in others] == ([2] if GOOD in behind else [])
