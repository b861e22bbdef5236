"""A draft vocabulary from recipe to verdict: trained over, or cut when it decodes; what the pre-flight and exports say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from draftsmith.errors import RequestError
from draftsmith.launch.check.unread import check_read
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from helpers.runs.small_flags import MEASURING, TRAINING
from safetensors.torch import load_file

ROWS = ["--data.limit_rows", "40"]


def ids_in(file: Path) -> list[int]:
    offsets_U = load_file(file)["d2t"]
    return (offsets_U + torch.arange(len(offsets_U))).tolist()


def unwrapped(table: str) -> str:
    return " ".join(table.replace("│", " ").split())


def verdicts(run: Path) -> set[str]:
    return {row["verdict"] for row in json.loads((run / "eval" / "results.json").read_text())["rows"]}


@pytest.mark.slow
def test_an_eagle_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Trained over 512 tokens, decoded with these and with the 64 most frequent of them, and written for SGLang."""
    run = tmp_path / "run"
    train = ["train", "eagle-tiny", "--out", str(run), "--loop.steps", "2", "--eagle.vocabulary", "512"]
    assert main([*train, *TRAINING]) == 0
    assert "the draft vocabulary of 512 tokens has" in caplog.text
    ids = ids_in(run / "drafter/model.safetensors")
    assert ids == sorted(set(ids))
    assert len(ids) == 512
    for words in ([], ["--drafter.draft_vocabulary", "64"]):
        assert main(["eval", str(run), *MEASURING, *words]) == 0
        assert verdicts(run) == {"lossless"}
    capfd.readouterr()
    assert main(["export", str(run), "--format", "sglang"]) == 0
    said = capfd.readouterr().out
    assert "torch.save(json.load(open(" in said
    assert "--speculative-token-map" in said
    assert json.loads((run / "sglang/hot_token_id.json").read_text()) == ids
    assert main(["export", str(run), "--format", "vllm"]) == 0
    assert "vllm reads no map of these" in caplog.text
    assert "d2t" not in load_file(run / "vllm/model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "option", "form", "why"),
    [
        ("distill-tiny", "model.vocabulary", "vllm", "engines draft by all rows of its projection"),
        ("dspark-tiny", "block.vocabulary", "vllm", "engines read a row for each of the target's 4,096"),
        ("dflash2-tiny", "block.vocabulary", "vllm", "engines read a row for each of the target's 4,096"),
        ("medusa-tiny", "medusa.vocabulary", "vllm", ""),
        ("mtp-tiny", "mtp.vocabulary", "vllm", ""),
        ("bpd-tiny", "bpd.vocabulary", "vllm", "no serving engine loads"),
    ],
)
def test_other_runs(
    recipe: str, option: str, form: str, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", recipe, "--out", str(run), "--loop.steps", "2", f"--{option}", "512", *TRAINING]) == 0
    assert main(["eval", str(run), *MEASURING, "--eval.max_new_tokens", "10"]) == 0
    assert verdicts(run) == {"lossless"}
    capfd.readouterr()
    assert (main(["export", str(run), "--format", form]) == 0) == (not why)
    assert why in capfd.readouterr().err


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("recipe", "option", "own"),
    [
        ("medusa-tiny", "medusa.vocabulary", True),
        ("dspark-tiny", "block.vocabulary", True),
        ("eagle-tiny", "eagle.vocabulary", False),
    ],
)
def test_the_pre_flight_counts_the_rows(
    recipe: str, option: str, own: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of what has rows of its own, that many less; a chunk of logits is smaller for all."""
    sizes, chunks = [], []
    for words in ([], [f"--{option}", "512"]):
        assert main(["check", recipe, "--out", str(tmp_path), *ROWS, *words]) == 0
        said = unwrapped(capfd.readouterr().out)
        sizes.append(float(said.split(" M parameters; ")[0].split()[-1].replace(",", "")))
        chunks.append(said.split(" for a chunk of logits")[0].split(", ")[-1])
        assert (f"a draft vocabulary of 512 tokens ({option})" in said) == bool(words)
    assert (sizes[1] < sizes[0]) == own
    assert chunks[0] != chunks[1]


def test_values_that_contradict_each_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "dflash2-tiny", "--out", str(tmp_path), *ROWS, "--block.vocabulary", "4"]) != 0
    assert "and block.vocabulary is 4;" in unwrapped(capfd.readouterr().out)
    for recipe in ("boost-tiny", "pard-tiny", "target-tiny"):
        with pytest.raises(RequestError, match=r"model\.vocabulary is 512, and method `\w+` does not read it"):
            check_read(load_recipe(recipe, [("model.vocabulary", "512")]).recipe)


def test_an_adapter_is_trained_for_all_tokens() -> None:
    recipe = load_recipe("distill-lora-tiny", [("model.vocabulary", "512")]).recipe
    with pytest.raises(RequestError, match="an adapter changes layers and no projection"):
        recipe.record.code().check_recipe(recipe)
