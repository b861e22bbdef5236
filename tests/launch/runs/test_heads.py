"""Drafters that ride on the target, from recipe to verdict: trained, resumed, decoded, audited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftsmith.launch.cli import main
from helpers.models.shallow_target import ON_SHALLOW
from helpers.runs.small_flags import MEASURING, TRAINING
from helpers.runs.small_run import assert_same_weights


@pytest.mark.run
@pytest.mark.slow  # every day the README's commands go this way with a draft model
@pytest.mark.parametrize(
    "recipe",
    [
        "eagle3-tiny",
        "medusa-tiny",
        "dspark-tiny",
        "bpd-tiny",
        "hydra-tiny",
        "hydra-plus-tiny",
        "eagle-tiny",
        "dflash-tiny",
        "dflash2-tiny",
        "peagle-tiny",
        "pard-tiny",
        "mtp-tiny",
    ],
)
def test_from_recipe_to_verdict(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["train", recipe, "--out", str(out), "--loop.steps", "2", *TRAINING, *ON_SHALLOW]) == 0
    shorter = ["--eval.sweep", "[2]"] if recipe == "pard-tiny" else []  # other lengths are measured beside its own
    assert main(["eval", str(out), *MEASURING, *shorter]) == 0
    rows = json.loads((out / "eval" / "results.json").read_text())["rows"]
    family = recipe.removesuffix("-tiny").replace("-plus", "++")
    assert [row["method"] for row in rows] == [family] * 2
    assert {row["verdict"] for row in rows} == {"lossless"}
    assert main(["report", str(out)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_an_eagle_decodes_on_trees(tree: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["train", "eagle-tiny", "--out", str(out), "--loop.steps", "1", *TRAINING, *ON_SHALLOW]) == 0
    sizes = ["--drafter.eagle.nodes", "12", "--drafter.eagle.top_k", "3"] if tree == "dynamic" else []
    shape = ["--drafter.eagle.tree", tree, *sizes]
    assert main(["eval", str(out), *shape, *MEASURING, "--eval.max_new_tokens", "12"]) == 0
    rows = json.loads((out / "eval" / "results.json").read_text())["rows"]
    assert {row["verdict"] for row in rows} == {"lossless"}
    assert all(row["nodes"] > 5 for row in rows)


@pytest.mark.run
@pytest.mark.parametrize(
    "recipe",
    [
        "eagle-tiny",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "hydra-plus-tiny",
                "bpd-tiny",
                "bpd-tuned-tiny",
                "dflash-tiny",
                "dflash2-tiny",
                "dspark-tiny",
                "peagle-tiny",
                "pard-tiny",
                "mtp-tiny",
            )
        ),
    ],
)
def test_a_run_that_was_cut_ends_with_the_same_bits(recipe: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ["--loop.steps", "3", "--checkpoint.keep", "3", *TRAINING, *ON_SHALLOW]
    for out in (whole, cut):
        assert main(["train", recipe, "--out", str(out), *words]) == 0
    for step in (3, 2):  # as if the run had been killed behind step 1
        (cut / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    assert main(["train", recipe, "--out", str(cut), *words]) == 0
    assert_same_weights(whole, cut, steps=3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "recipe",
    [
        "medusa-tiny",
        "hydra-tiny",
        "hydra-plus-tiny",
        "eagle-tiny",
        "eagle3-tiny",
        "dflash-tiny",
        "dspark-tiny",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("dflash2-tiny", "peagle-tiny", "pard-tiny", "mtp-tiny")
        ),
    ],
)
def test_the_pre_flight_knows_what_is_trained(recipe: str, tmp_path: Path, capfd) -> None:
    assert main(["check", recipe, "--out", str(tmp_path), "--data.limit_rows", "40", *ON_SHALLOW]) == 0
    assert "M parameters" in capfd.readouterr().out
