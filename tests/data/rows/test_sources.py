"""The same rows from every format, folders and globs, columns, held-out rows, the cache."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.data.config import DataConfig
from draftsmith.data.rows.prepare import prepare, training_texts
from draftsmith.data.rows.raw import Extents
from draftsmith.data.rows.records import Placed, RecordReader, held_out
from draftsmith.data.rows.shapes import Chat, Record, Text, Tokens, find_shape, parse
from draftsmith.data.rows.sources import Source, StdlibSource, open_sources, stdlib_texts
from draftsmith.decoding.backbone.hub import load_tokenizer
from draftsmith.errors import DataError, RequestError

ROWS = [{"prompt": f"question {n}\n\tπ", "completion": f'"answer", {n}'} for n in range(9)]


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    elif path.suffix == ".parquet":
        from datasets import Dataset

        Dataset.from_list(rows).to_parquet(path)
    else:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t" if "t" in path.suffix else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def records(**config: object) -> list[Record]:
    wanted = DataConfig(**config)
    train, _ = open_sources(wanted)
    rows = list(RecordReader(wanted).read(train))
    assert all(isinstance(each, Placed) for each in rows), rows
    return [each.record for each in rows if isinstance(each, Placed)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_every_format_gives_the_same_rows(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows{suffix}", ROWS)
    assert records(source=str(path)) == [parse(row, "prompt_completion") for row in ROWS]


def test_folders_and_globs_are_read_in_order_of_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / "b.jsonl", ROWS[:2])
    write(tmp_path / "sub" / "a.csv", ROWS[2:4])
    write(tmp_path / ".hidden" / "c.jsonl", ROWS[4:])
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    expected = [parse(row, "prompt_completion") for row in ROWS]
    assert records(source=str(tmp_path)) == expected[:4]
    assert records(source=str(tmp_path / "*.jsonl")) == expected[:2]
    assert records(source=str(tmp_path), limit_rows=3) == expected[:3]


def test_hub_sets_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes a folder for a repository of that name, so its way can be gone offline."""
    (tmp_path / "chats").mkdir()
    write(tmp_path / "chats" / "train.jsonl", ROWS[:6])
    write(tmp_path / "chats" / "test.jsonl", ROWS[6:])
    monkeypatch.chdir(tmp_path)
    expected = [parse(row, "prompt_completion") for row in ROWS]
    assert records(source="hub:chats", revision="main") == expected[:6]
    assert records(source="hub:chats", split="test") == expected[6:]
    config = DataConfig(source="hub:chats", validation_split="test")
    train, held = open_sources(config)
    assert held is not None
    assert train.identity() != held.identity()
    assert train.identity() == open_sources(config)[0].identity()
    says_how_far(train)
    with pytest.raises(RequestError, match="hub:chats"):
        open_sources(DataConfig(source="hub:chats", split="nothing"))


def test_shapes_are_found_by_columns() -> None:
    message = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: list[tuple[dict, Record]] = [
        ({"messages": turns}, Chat(turns)),
        ({"conversations": message}, Chat(turns)),
        ({"conversations": message, "system": "s"}, Chat([{"role": "system", "content": "s"}, *turns])),
        ({"prompt": "a", "completion": "b"}, Chat(turns, plain=True)),
        ({"prompt": turns[:1], "completion": turns[1:]}, Chat(turns)),
        ({"instruction": "a", "input": "", "output": "b"}, Chat(turns, plain=True)),
        (
            {"instruction": "a", "input": "c", "output": "b"},
            Chat([{"role": "user", "content": "a\nc"}, turns[1]], plain=True),
        ),
        ({"text": "a"}, Text("a")),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, Tokens([5, 6, 7], [False, True, True])),
        ({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}, Tokens([5, 6])),
    ]
    for row, record in rows:
        shape = find_shape(row)
        assert shape is not None
        assert parse(row, shape) == record


def test_columns_are_renamed(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"q": "a", "a": "b", "prompt": "other"}])
    read = records(source=str(path), columns={"q": "prompt", "a": "completion"})
    assert read == [parse({"prompt": "a", "completion": "b"}, "prompt_completion")]
    with pytest.raises(RequestError, match="renames 'x'"):
        records(source=str(path), columns={"x": "prompt"})
    with pytest.raises(DataError, match="expected text"):
        records(source=str(path), shape="text")


def test_long_texts_become_blocks_that_lose_nothing(tmp_path: Path) -> None:
    text = "".join(f"line {n} of a long book\n" for n in range(5000))
    (tmp_path / "book.txt").write_text(text)
    read = records(source=str(tmp_path / "book.txt"), sequence_length=16)
    assert len(read) > 100
    assert all(isinstance(each, Text) for each in read)
    assert "".join(each.text for each in read) == text
    assert [each.ends for each in read] == [False] * (len(read) - 1) + [True]


def test_equal_rows_are_held_out_together() -> None:
    rng = np.random.default_rng(0)
    digests = rng.integers(0, 2**64, 4000, dtype=np.uint64).tolist()
    out = held_out([*digests, *digests], 0.1)
    assert (out[:4000] == out[4000:]).all()
    assert 300 < out[:4000].sum() < 500
    assert held_out(digests[:3], 1e-9).sum() == 1
    with pytest.raises(DataError, match="cannot be split"):
        held_out([5, 5], 0.1)


def test_equal_rows_do_not_hold_out_nearly_everything() -> None:
    """One content, thousands of times, whose hash happens to fall under the share."""
    with pytest.raises(
        DataError, match="24,414 of 24,415 rows would be held out, because 24,414 of them have the same"
    ):
        held_out([5] * 24_414 + [2**63], 0.03)
    assert held_out([2**63] * 24_414 + [5], 0.03).sum() == 1
    assert held_out([1, 2, 2**63], 0.4).sum() == 2
    with pytest.raises(DataError, match="4 of 5 rows would be held out, because 3 of them have the same"):
        held_out([5, 5, 5, 6, 2**63], 0.03)
    assert held_out([5, 5, 6, 2**63], 0.03).sum() == 3, "half of the rows are not most of them"


def test_a_long_source_says_how_far_it_is(
    tmp_path: Path, chat_tokenizer_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text without a line end too, in which nothing else shows that something happens."""
    monkeypatch.setattr("draftsmith.data.rows.report._LONG", 10**6)
    caplog.set_level("INFO", "draftsmith")
    (tmp_path / "long.txt").write_text("".join(f"{number} " for number in range(200_000)))
    config = DataConfig(source=str(tmp_path / "long.txt"), sequence_length=16, cache=str(tmp_path))
    prepare(config, load_tokenizer(str(chat_tokenizer_folder)), out=None)
    said = [line for line in caplog.messages if " of 1 MB read, " in line]
    assert 5 <= len(said) <= 9


def says_how_far(source: Source) -> None:
    """All of its bytes are read when all rows were, and fewer before."""
    extents: Extents = {}
    rows = source.rows(extents)
    next(rows)
    (extent,) = extents.values()
    assert 0 < extent.read < extent.size
    assert len(list(rows)) > 1
    assert extent.read == extent.size


def test_the_library_says_how_far_it_is_read() -> None:
    says_how_far(StdlibSource("validation"))


def test_the_librarys_split_is_a_property_of_the_path() -> None:
    names = {split: {name for name, _ in stdlib_texts(split)} for split in ("train", "validation", "prompts")}
    assert all(names.values())
    assert not names["train"] & names["validation"]
    assert not names["train"] & names["prompts"]
    assert not names["validation"] & names["prompts"]
    # modules that every supported Python has; a change of the split would change every figure
    assert {"json/decoder.py", "argparse.py"} <= names["train"] | names["validation"] | names["prompts"]


def test_named_validation_rows(tmp_path: Path, chat_tokenizer_folder: Path) -> None:
    train, held = write(tmp_path / "a.jsonl", ROWS[:6]), write(tmp_path / "b.jsonl", ROWS[5:])
    config = DataConfig(source=str(train), validation=str(held), cache=str(tmp_path / "cache"))
    prepared = prepare(config, load_tokenizer(str(chat_tokenizer_folder)), out=None)
    assert prepared.report.validation_rows == 4
    assert prepared.report.leaked == 1
    assert "held-out rows are also trained on" in prepared.report.text()
    assert sum(1 for _ in training_texts(config)) == 12  # prompts and answers of six rows


def test_the_cache_knows_everything_that_shaped_it(tmp_path: Path, chat_tokenizer_folder: Path) -> None:
    """The ends of the target's generation settings too: rows that spell one are left out."""
    path, cache = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "cache"
    tokenizer = load_tokenizer(str(shutil.copytree(chat_tokenizer_folder, tmp_path / "target")))

    def fingerprint(**config: Any) -> str:
        made = DataConfig(source=str(path), cache=str(cache), **config)
        return prepare(made, tokenizer, out=None).report.fingerprint

    first = fingerprint()
    assert fingerprint() == first
    assert len(list(cache.iterdir())) == 1
    seen = {first, fingerprint(sequence_length=64), fingerprint(loss_on="all"), fingerprint(packing=False)}
    tokenizer.chat_template = tokenizer.chat_template.replace("Tools:", "Functions:")
    seen.add(fingerprint(loss_on="all"))
    tokenizer.chat_template += "{# style #}"
    seen.add(fingerprint())
    seen.add(fingerprint(template_values={"style": 1}))
    for ends in ("[5, 6]", "[5, 7]"):
        (Path(tokenizer.name_or_path) / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
        seen.add(fingerprint())
    write(path, ROWS[1:])
    seen.add(fingerprint())
    assert len(seen) == 10


def test_a_damaged_cache_entry_is_made_anew(tmp_path: Path, chat_tokenizer_folder: Path) -> None:
    path, cache = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "cache"
    config = DataConfig(source=str(path), cache=str(cache))
    tokenizer = load_tokenizer(str(chat_tokenizer_folder))
    before = prepare(config, tokenizer, out=None)
    ids = np.array(before.train.ids_RS)
    (entry,) = cache.iterdir()
    array = entry / "train.ids_RS.npy"
    array.write_bytes(array.read_bytes()[:-8] + b"\1" * 8)
    again = prepare(config, tokenizer, out=None)
    assert (np.array(again.train.ids_RS) == ids).all()
    assert not (np.load(entry / "train.ids_RS.npy") != ids).any()
