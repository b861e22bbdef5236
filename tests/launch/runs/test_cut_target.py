"""Runs of two processes whose target is cut over them: the same numbers as with whole targets, to the bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from draftsmith.benchmarks.common.random_models import RECURRENT
from draftsmith.launch.cli import main
from helpers.models.random_models import random_model
from helpers.models.shallow_target import SHALLOW
from helpers.runs.launcher import ended, launched
from helpers.runs.method_runs import CLOCKS, COMMON, LAUNCHER, RECIPES, records
from helpers.runs.small_run import assert_same_weights, drafter, losses
from transformers import AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.run]
STEPS = 6
OWN = {name: f"method: {name}\n{text}" for name, text in RECIPES.items() if name != "medusa2"} | {
    "distill": "method: distill\nmodel: {layers: 1, hidden: 64, intermediate: 64, heads: 1, kv_heads: 1}\n",
    "cached": f"method: eagle3\nfeatures: {{source: cache}}\n{RECIPES['eagle3']}",
}


HOW = {
    "none": "sharding: none",
    "fully_shard": "sharding: fully_shard",
    "offloaded": "sharding: fully_shard, offload: true",
    "team": "tensor_parallel: 2",
}


def write(folder: Path, names: list[str], how: str, common: str = COMMON, target: str = SHALLOW) -> list[str]:
    """A recipe for each, called NAME-HOW."""
    paths = []
    for name in names:
        path = folder / f"{name}-{how}.yaml"
        path.write_text(f"name: run\ntarget: {{path: {target}, {HOW[how]}}}\n{OWN[name]}{common}")
        paths.append(str(path))
    return paths


def assert_same_numbers(cut: Path, whole: Path) -> None:
    """Every value of every record that is no clock, and every bit of the drafter."""
    found, wanted = records(cut), {key: each for key, each in records(whole).items() if key[0] != "probe"}
    assert found.keys() == wanted.keys()
    assert len(found) == STEPS + 1
    for key, values in wanted.items():
        for name in values.keys() - CLOCKS:
            assert found[key][name] == values[name], (key, name)
    mine, theirs = drafter(cut), drafter(whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("config", "names"), [("multi_cpu", list(OWN)), ("zero2", ["eagle3"])])
def test_a_cut_target_teaches_the_same(config: str, names: list[str], tmp_path: Path) -> None:
    if config == "zero2":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    recipes = [*write(tmp_path, names, "none"), *write(tmp_path, names, "fully_shard")]
    said = launched(config, LAUNCHER, str(tmp_path), *recipes)
    held = re.findall(
        r"target.sharding is fully_shard: ([\d.]+) M of the target's ([\d.]+) M numbers on each of 2 processes", said
    )
    assert len(held) == len(names)
    assert all(float(share) < 0.8 * float(whole) for share, whole in held)  # most of this one is its embedding
    for name in names:
        assert_same_numbers(tmp_path / f"{name}-fully_shard", tmp_path / f"{name}-none")


def test_a_recurrent_target_teaches_the_same(tmp_path: Path) -> None:
    """Processes have different numbers of documents, so that passes are made up; such states agree within rounding."""
    target = tmp_path / "lfm2"
    tokenizer = AutoTokenizer.from_pretrained(SHALLOW)
    sizes = RECURRENT["lfm2"] | {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    random_model("lfm2", **sizes).save_pretrained(target)
    tokenizer.save_pretrained(target)
    recipes = [write(tmp_path, ["medusa"], how, target=str(target))[0] for how in ("none", "fully_shard")]
    launched("multi_cpu", LAUNCHER, str(tmp_path), *recipes)
    found = records(tmp_path / "medusa-fully_shard")
    wanted = {key: each for key, each in records(tmp_path / "medusa-none").items() if key[0] != "probe"}
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        for name in values.keys() - CLOCKS:
            value = values[name]
            near = pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value
            assert found[key][name] == near, (key, name)


@pytest.mark.parametrize(("config", "names"), [("multi_cpu", list(OWN)), ("zero2", ["eagle3"])])
def test_a_target_that_a_team_holds_teaches_the_same(config: str, names: list[str], tmp_path: Path) -> None:
    """But for the rounding of sums; it decodes in probes, as a whole one does."""
    if config == "zero2":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    recipes = [*write(tmp_path, names, "none"), *write(tmp_path, names, "team")]
    said = launched(config, LAUNCHER, str(tmp_path), *recipes)
    assert said.count("they decode with it together") == len(names)
    for name in names:
        assert_close(tmp_path / f"{name}-team", tmp_path / f"{name}-none")


def assert_close(mine: Path, whole: Path) -> None:
    """Every value of every record that is no clock, probes too, and the drafter's weights."""
    found, wanted = records(mine), records(whole)
    assert found.keys() == wanted.keys()
    assert ("probe", STEPS) in found
    for key, values in wanted.items():
        for name in values.keys() - CLOCKS - {"kind"}:
            value = values[name]
            near = pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value
            assert found[key][name] == near, (key, name)
    ours, theirs = drafter(mine), drafter(whole)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        # AdamW makes a whole step of a gradient that is rounding alone; a map of tokens is no weight, and is the same
        far = (ours[name].double() - weight.double()).norm()
        assert far <= (1e-3 * weight.double().norm() if weight.is_floating_point() else 0), name


def test_a_team_evaluates_and_audits(tmp_path: Path) -> None:
    """What one process measures, but for the clock; written and said once."""
    (recipe,) = write(tmp_path, ["eagle3"], "team")
    assert main(["train", recipe, "--out", str(tmp_path / "run")]) == 0
    less = ["--eval.limit", "2", "--eval.max_new_tokens", "8", "--audit.tokens", "500", "--audit.sequences", "10000"]
    assert main(["eval", str(tmp_path / "run"), "--out", str(tmp_path / "one"), *less]) == 0
    words = ["-m", "draftsmith.launch.cli", "eval", str(tmp_path / "run"), "--out", str(tmp_path / "two"), *less]
    said = launched("multi_cpu", *words)
    assert said.count("results: ") == said.count("verdict: ") == 1  # by the first process
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert [row["tau"] for row in two["rows"]] == [row["tau"] for row in one["rows"]]
    assert {row["verdict"] for row in two["rows"]} == {row["verdict"] for row in one["rows"]}
    assert json.loads((tmp_path / "two" / "audit.json").read_text())["failures"] == []


def test_processes_that_would_each_decode_everything_are_refused(tmp_path: Path) -> None:
    words = ["eval", "--target", "tiny", "--method", "prompt-lookup", "--out", str(tmp_path / "out")]
    ended_by = ended("multi_cpu", "-m", "draftsmith.launch.cli", *words)
    assert ended_by.returncode
    assert "2 processes were launched, and target.tensor_parallel is 1" in ended_by.stderr


def test_an_offloaded_target_teaches_the_same(tmp_path: Path) -> None:
    recipes = [*write(tmp_path, ["eagle3"], "none"), *write(tmp_path, ["eagle3"], "offloaded")]
    launched("multi_cpu", LAUNCHER, str(tmp_path), *recipes)
    assert_same_numbers(tmp_path / "eagle3-offloaded", tmp_path / "eagle3-none")


def test_a_run_with_a_cut_target_goes_on(tmp_path: Path) -> None:
    """In as many processes to the same bits; in one process, which holds all of it, to the same losses but rounding."""
    common = COMMON.replace("every_steps: 6", "every_steps: 3, keep: 9")
    (recipe,) = write(tmp_path, ["eagle3"], "fully_shard", common)
    launched("multi_cpu", LAUNCHER, str(tmp_path / "whole"), recipe)
    name = Path(recipe).stem
    for place in ("again", "alone"):
        shutil.copytree(
            tmp_path / "whole" / name, tmp_path / place / name, ignore=shutil.ignore_patterns("drafter", "status.json")
        )
        shutil.rmtree(tmp_path / place / name / "checkpoints" / f"step-{STEPS:08d}")
    launched("multi_cpu", LAUNCHER, str(tmp_path / "again"), recipe)
    assert_same_weights(tmp_path / "again" / name, tmp_path / "whole" / name, STEPS)
    assert main(["train", recipe, "--out", str(tmp_path / "alone" / name)]) == 0
    expected = losses(tmp_path / "whole" / name)
    assert losses(tmp_path / "alone" / name) == pytest.approx(expected, rel=1e-4)
