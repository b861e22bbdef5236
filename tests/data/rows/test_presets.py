"""Sets of rows by name: what is stated of each, the words that name them, the hub's files and copies of one's own."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import draftsmith
import pytest
from draftsmith.data.config import DataConfig
from draftsmith.data.prompt_sets import SETS
from draftsmith.data.rows.presets import chosen_preset, is_on_hub, presets
from draftsmith.data.rows.raw import RawRow
from draftsmith.data.rows.records import Placed, RecordReader
from draftsmith.data.rows.shapes import Chat, find_shape
from draftsmith.data.rows.sources import open_sources
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.launch.cli import main

ROOT = Path(draftsmith.__path__[0])
# a row of each set as its publisher has it, and the prompt and the answer that it holds
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
OWN: dict[str, dict[str, Any]] = {
    "sharegpt": {"id": "x_0", "conversations": TURNS},
    "ultrachat": {
        "prompt": "q",
        "prompt_id": "0f",
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    },
    "perfectblend": {"conversations": TURNS, "source": "meta-math/MetaMathQA"},
    "magpie": {"uuid": "0f", "instruction": "q", "response": "a", "conversations": TURNS, "difficulty": "easy"},
    "gsm8k": {"question": "q", "answer": "a"},
    "open-code": {"id": "0f", "input": "q", "output": "a", "domain": "generic", "unit_tests": "[]"},
    "magicoder": {"lang": "python", "raw_index": 1, "index": 2, "seed": "s", "problem": "q", "solution": "a"},
}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(**config: Any) -> list[tuple[str, ...]]:
    """Prompt and answer of every row."""
    wanted = DataConfig(**config)
    found = list(RecordReader(wanted).read(open_sources(wanted)[0]))
    records = [each.record for each in found if isinstance(each, Placed)]
    assert len(records) == len(found)
    assert all(isinstance(each, Chat) for each in records)
    return [tuple(turn["content"] for turn in each.messages) for each in records if isinstance(each, Chat)]


def test_every_set_is_whole() -> None:
    assert set(OWN) == set(presets())
    for name, each in presets().items():
        assert re.fullmatch("[0-9a-f]{40}", each.revision)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", each.repository)
        assert set(each.columns) <= set(OWN[name])
        renamed = {each.rename.get(column, column) for column in each.columns}
        assert find_shape(renamed) is not None
        assert set(each.rename) <= set(each.columns)
    assert presets()["gsm8k"].revision == SETS["gsm8k"].revision


@pytest.mark.parametrize("name", OWN)
def test_a_copy_of_ones_own(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "own.jsonl", OWN[name])
    assert read(source=f"{name}={path}") == [("q", "a")]
    assert not is_on_hub(f"{name}={path}")
    assert is_on_hub(name)


def test_a_copy_that_has_a_shape_already_is_read_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "own.jsonl", {"prompt": "q", "completion": "a"})
    assert read(source=f"gsm8k={path}") == [("q", "a")]
    path = written(tmp_path / "own.jsonl", {"q": "q", "answer": "a", "completion": "b"})
    assert read(source=f"gsm8k={path}", columns={"q": "prompt"}) == [("q", "b")]


def test_the_hubs_split_config_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes a folder for a repository of that name, so its way can be gone offline."""
    monkeypatch.chdir(tmp_path)
    gsm = tmp_path / "openai" / "gsm8k"
    files = {
        config: [{"split": split, "path": f"{config}/{split}.jsonl"} for split in ("train", "test")]
        for config in ("main", "socratic")
    }
    configs = [{"config_name": name, "data_files": each} for name, each in files.items()]
    for config in files:
        for split in ("train", "test"):
            written(gsm / config / f"{split}.jsonl", {"question": config, "answer": split})
    (gsm / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    assert read(source="gsm8k") == [("main", "train")]
    assert read(source="gsm8k", split="test") == [("main", "test")]
    train, held = open_sources(DataConfig(source="gsm8k", validation_split="test"))
    assert held is not None
    assert [row.columns for row in held.rows() if isinstance(row, RawRow)] == [
        {"prompt": "main", "completion": "test"}
    ]
    assert train.identity() != held.identity()
    assert train.identity() == open_sources(DataConfig(source="gsm8k"))[0].identity()
    assert train.name == f"gsm8k ({presets()['gsm8k'].origin}[train])"
    assert "@abc[" in open_sources(DataConfig(source="gsm8k@abc"))[0].name
    assert "@def[" in open_sources(DataConfig(source="gsm8k", revision="def"))[0].name
    sharegpt = tmp_path / presets()["sharegpt"].repository
    written(sharegpt / "HTML_cleaned_raw_dataset" / "other.json", {"html": "x"})
    (sharegpt / str(presets()["sharegpt"].file)).write_text(json.dumps([OWN["sharegpt"]]))
    assert read(source="sharegpt") == [("q", "a")]
    ultrachat = tmp_path / presets()["ultrachat"].repository
    for split in ("train_sft", "test_sft", "train_gen"):
        written(ultrachat / "data" / f"{split}.jsonl", OWN["ultrachat"])
    parts = [{"split": split, "path": f"data/{split}.jsonl"} for split in ("train_sft", "test_sft", "train_gen")]
    (ultrachat / "README.md").write_text(
        f"---\nconfigs: {json.dumps([{'config_name': 'a', 'data_files': parts}])}\n---\n"
    )
    assert open_sources(DataConfig(source="ultrachat"))[0].name.endswith("[train_sft])")


def test_without_a_network_the_file_to_bring_is_named() -> None:
    said = r"data: sharegpt \(hub:anon.*\) cannot be loaded \(.*\); connect, or bring ShareGPT_V3_.*\.json "
    with pytest.raises(EnvironmentFailure, match=said + r"\(conversations\) and give sharegpt=FILE in its place$"):
        open_sources(DataConfig(source="sharegpt"))
    with pytest.raises(EnvironmentFailure, match=r"bring a file of its split train \(question and answer\)"):
        open_sources(DataConfig(source="gsm8k"))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("gms8k", "or a set by name (sharegpt, ultrachat, perfectblend"),
        ("gms8k@main", "did you mean gsm8k?"),
        ("gsm8k=", "names nothing behind =; expected gsm8k, gsm8k@REVISION or gsm8k=FILE"),
        ("gsm8k@", "names nothing behind @"),
        ("gsm8k=none.jsonl", "there is no 'none.jsonl'"),
    ],
)
def test_words_that_name_nothing(source: str, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        open_sources(DataConfig(source=source))


def test_a_folder_of_that_name_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "gsm8k" / "a.jsonl", {"prompt": "mine", "completion": "a"})
    with caplog.at_level(logging.WARNING):
        assert read(source="gsm8k") == [("mine", "a")]
    assert "gsm8k is a file or folder here, and is read in place of the set of that name" in caplog.text
    assert chosen_preset("gsm8k@main") is not None


def test_ls_and_the_page_list_every_set(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--sources"]) == 0
    printed = capfd.readouterr().out
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    for name, each in presets().items():
        assert f"{name}  {each.good_for}" in printed
        assert f"licence {each.licence}, {each.origin}" in printed
        assert f"| `{name}` | {each.good_for} |" in page
    assert main(["ls", "--sources", "--drafters"]) == 2
    assert "give one of them" in capfd.readouterr().err
