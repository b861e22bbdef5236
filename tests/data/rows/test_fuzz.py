"""Real rows, damaged byte by byte and value by value: each line is used, or rejected by file, line and reason."""

from __future__ import annotations

import copy
import csv
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.config import DataConfig
from draftsmith.data.rows.cache import Prepared
from draftsmith.data.rows.prepare import prepare
from draftsmith.data.rows.raw import Extent, RawRow, Rejected
from draftsmith.data.rows.readers import read_file
from draftsmith.decoding.backbone.hub import load_tokenizer
from helpers.reliability_tally import tally

TOOL = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC", "of": [1, 2.5]}}}


def chat(number: int) -> dict[str, Any]:
    """A row with a system turn, tools, a call and its result."""
    return {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": f"the time, fox {number}?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "clock", "content": "12:00"},
            {"role": "assistant", "content": [{"type": "text", "text": f"noon, dog {number}"}]},
        ],
        "tools": [TOOL],
    }


def exchange(number: int) -> dict[str, Any]:
    return {"prompt": f'question "{number}", asked', "completion": f"answer {number}\nin lines"}


def tokens(number: int) -> dict[str, Any]:
    ids = [(number * 7 + at) % 300 for at in range(12)]
    return {"input_ids": ids, "loss_mask": [0] * 4 + [1] * 8, "attention_mask": [1] * 11 + [0]}


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


ODD: list[Any] = [
    *(None, True, -1, 2, 10**30, 1e308, float("inf"), float("nan")),
    *("", " ", "\ud800", "\udfff x", "\0", "a\u2028b", "<|im_end|>", "x<|endoftext|>\n<|im_start|>user", "é" * 300),
    *([], {}, [None], {"": {}}, {"\ud800": 1}, [[]], deep(120), deep(700), ["a"], {"role": "user"}),
    *("user", "assistant", "narrator", "[1", '[{"a": 1}]', "{{ 1/0 }}", "{% for %}", "\ufeff", "\x1b[31m", "[/red]"),
]
PIECES = [
    *(
        b'"',
        b"\xff",
        b"\xe9",
        b"\0",
        b"\xed\xa0\x80",
        b"{",
        b"[",
        b"]",
        b"}",
        b",",
        b":",
        b"\\",
        b"\\ud800",
        b"\\u0000",
    ),
    *(
        b"\n",
        b"\r",
        b"\r\n",
        b"1e999",
        b"9" * 30,
        b"9" * 5000,
        b"null",
        b"NaN",
        b"\t",
        b"\xef\xbb\xbf",
        b"[" * 2000,
        b" ",
    ),
]


def odd_value(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The row with one value, at any depth, replaced, taken out or moved."""
    row = copy.deepcopy(row)
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [row]
    while waiting:
        inside = waiting.pop()
        for key, each in inside.items() if isinstance(inside, dict) else enumerate(inside):
            places.append((inside, key))
            if isinstance(each, dict | list):
                waiting.append(each)
    inside, key = rng.choice(places)
    way = rng.randrange(5)
    if way == 0:
        del inside[key]
    elif way == 1 and isinstance(inside, dict):
        inside[rng.choice(["\ud800", "name", "tool_calls", "role", "labels", "x" * 100])] = rng.choice(ODD)
    else:
        inside[key] = rng.choice(ODD)
    return row


def odd_bytes(line: bytes, rng: random.Random, pieces: list[bytes] = PIECES) -> bytes:
    """The line with bytes put in, taken out, changed or doubled, up to three times."""
    for _ in range(rng.randint(1, 3)):
        at, end = sorted(rng.randint(0, len(line)) for _ in range(2))
        line = rng.choice(
            [
                line[:at] + rng.choice(pieces) + line[at:],
                line[:at] + line[end:],
                line[:at] + bytes([rng.randrange(256)]) + line[at + 1 :],
                line[:end] + line[at:],
                line[:at],
            ]
        )
    return line


def as_json(row: dict[str, Any], rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return json.dumps(odd_value(row, rng)).encode()
    return odd_bytes(json.dumps(row, ensure_ascii=False).encode(), rng)


def as_csv(row: dict[str, Any], rng: random.Random | None) -> bytes:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="").writerow(row.values())
    line = stream.getvalue().encode()
    return line if rng is None else odd_bytes(line, rng)


def is_utf8(line: str) -> bool:
    """Whether none of its bytes was taken for a surrogate."""
    return not any("\udc80" <= each <= "\udcff" for each in line)


def used_all(path: Path, tokenizer_folder: Path, out: Path, length: int = 512) -> Prepared:
    """Prepared as for training; all bytes were read, and every rejected row has its place and reason."""
    config = DataConfig(source=str(path), max_rejected_share=1.0, cache=str(out / "cache"), sequence_length=length)
    prepared = prepare(config, load_tokenizer(str(tokenizer_folder)), out=out)
    assert prepared.report.bytes_read == {str(path): (path.stat().st_size, path.stat().st_size)}
    places = [(each.file, each.line) for each in prepared.rejected]
    assert len(set(places)) == len(places)
    assert all(each.file == str(path) and each.line > 1 and each.reason for each in prepared.rejected)
    return prepared


MAKERS: dict[str, Callable[[int], dict[str, Any]]] = {"chats": chat, "exchanges": exchange, "tokens": tokens}
COUNTS = [pytest.param(50, id="50"), pytest.param(1700, id="1700", marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", MAKERS)
def test_json_lines(name: str, count: int, chat_tokenizer_folder: Path, tmp_path: Path) -> None:
    """Behind a good row for each; a line that is not blank is one row."""
    rng, make = random.Random(f"{name} {count}"), MAKERS[name]
    good = [json.dumps(make(at)).encode() for at in range(count + 1)]
    lines = [good[0], *(line for at in range(count) for line in (as_json(make(at), rng), good[at + 1]))]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    prepared = used_all(path, chat_tokenizer_folder, tmp_path)
    real = {at for at, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()}
    rejected = {each.line for each in prepared.rejected}
    assert rejected <= real
    assert prepared.report.rows == len(real) - len(rejected)
    assert count / 4 < len(rejected) <= len(real) - count - 1, "every good row is used"
    tally("fuzzed rows", tried=count)


@pytest.mark.parametrize("count", COUNTS)
def test_csv(count: int, chat_tokenizer_folder: Path, tmp_path: Path) -> None:
    """A line begins a row, is inside one that is used, is rejected, or is blank."""
    rng = random.Random(count)
    lines = [b"prompt,completion", as_csv(exchange(0), None)]
    for at in range(count):
        lines += [as_csv(exchange(at), rng), as_csv(exchange(at + count), None)]
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\n".join(lines))
    rows = list(read_file(path, block=100))
    text = path.read_bytes().decode(errors="surrogateescape")
    ends = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$", text)
    following = [*(row.line for row in rows[1:]), len(ends) + 1]
    for row, end in zip(rows, following, strict=True):
        assert row.line < end
        inside = ends[row.line : end - 1]
        if isinstance(row, RawRow):
            within = sum(len(re.findall(r"\r\n|\r|\n", each)) for each in row.columns.values())
            assert not "".join(inside[within:]).strip("\r\n"), row
        elif "the header has" not in row.reason:
            assert not "".join(inside).strip("\r\n"), row
    prepared = used_all(path, chat_tokenizer_folder, tmp_path)
    assert prepared.report.rows + prepared.report.rejected == len(rows)
    assert prepared.report.rows > 0.75 * count
    tally("fuzzed rows", tried=count)


@pytest.mark.parametrize("count", COUNTS)
def test_text(count: int, chat_tokenizer_folder: Path, tmp_path: Path) -> None:
    """Every line that is UTF-8 is used, in order, and every other one rejected."""
    rng = random.Random(count)
    path = tmp_path / "rows.txt"
    short = [each for each in PIECES if len(each) < 50]  # so no line is longer than a block
    lines = [f"line {at}: the quick brown fox, é\n".encode() for at in range(4 * count)]
    for at in range(20, len(lines), 4):
        lines[at] = odd_bytes(lines[at], rng, short)
    path.write_bytes(b"".join(lines))
    whole = re.split("\r\n|\r|\n", path.read_bytes().decode("utf-8-sig", errors="surrogateescape"))
    bad = [at for at, line in enumerate(whole, 1) if not is_utf8(line)]
    extent = Extent(path.stat().st_size)
    rows = list(read_file(path, block=1000, extent=extent))
    assert [row.line for row in rows if isinstance(row, Rejected)] == bad
    text = "\n".join(row.columns["text"] for row in rows if isinstance(row, RawRow))
    used = [line for line in text.split("\n") if line.strip()]
    assert used == [line for line in whole if is_utf8(line) and line.strip()]
    assert extent.read == extent.size
    prepared = used_all(path, chat_tokenizer_folder, tmp_path, length=16)
    blocks = [row for row in read_file(path, block=16 * 16) if isinstance(row, RawRow)]
    assert 0 < prepared.report.rows <= len(blocks)
    tally("fuzzed rows", tried=count)


@pytest.mark.parametrize("count", COUNTS)
def test_parquet(count: int, chat_tokenizer_folder: Path, tmp_path: Path) -> None:
    """Values that the columns' types allow: each row is one row, used or rejected."""
    import pyarrow
    from pyarrow.parquet import write_table

    rng = random.Random(count)
    words = [each for each in ODD if isinstance(each, str) and each.encode(errors="ignore").decode() == each]
    numbers = [None, 0, 1, -1, 2, 299, 300, 2**31, 2**63 - 1, -(2**63)]

    def text(value: str) -> str | None:
        return value if rng.random() < 0.8 else rng.choice([None, *words])

    def whole(values: list[int]) -> list[int | None] | None:
        odd = [each if rng.random() < 0.97 else rng.choice(numbers) for each in values]
        return rng.choice([odd, odd, odd, odd[: rng.randrange(len(odd))], None])

    turns = [
        [
            {"role": text("user"), "content": text(f"ask {at}")},
            {"role": text("assistant"), "content": text(f"so {at}")},
        ]
        for at in range(1, count // 2)
    ]
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = [{name: whole(values) for name, values in tokens(at).items()} for at in range(count - count // 2)]
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    tables = {
        "chats": pyarrow.table({"messages": pyarrow.array([good, *turns, good], pyarrow.list_(message))}),
        "tokens": pyarrow.Table.from_pylist(
            [tokens(0), *ids, tokens(1)],
            pyarrow.schema([(name, pyarrow.list_(pyarrow.int64())) for name in tokens(0)]),
        ),
    }
    for name, table in tables.items():
        write_table(table, tmp_path / f"{name}.parquet")
        prepared = used_all(tmp_path / f"{name}.parquet", chat_tokenizer_folder, tmp_path)
        assert prepared.report.rows + prepared.report.rejected == table.num_rows
        assert prepared.report.rejected > count // 20
    tally("fuzzed rows", tried=count)
