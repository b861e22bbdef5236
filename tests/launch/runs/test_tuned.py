"""A run that changes its target, from recipe to verdict: the tuned target is what is measured."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from draftsmith.eval.report.results import schema
from draftsmith.launch.cli import main
from helpers.models.shallow_target import ON_SHALLOW, SHALLOW
from helpers.runs.small_flags import MEASURING, TRAINING
from helpers.runs.small_run import assert_same_weights

SMALL = [*TRAINING, *ON_SHALLOW, "--optimizer.lr", "1e-2"]
MEASURED = [*MEASURING, "--eval.temperatures", "[0]"]


def train(out: Path, *words: str, steps: int = 2) -> None:
    how = ["--loop.steps", str(steps), "--tune.rest_steps", "1", *SMALL, *words]
    assert main(["train", "medusa2-tiny", "--out", str(out), *how]) == 0


@pytest.mark.slow
@pytest.mark.run
def test_from_recipe_to_verdict(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    train(out)
    assert main(["eval", str(out), *MEASURED]) == 0
    assert f"{out}/target decodes, and the audit compares with it" in capfd.readouterr().out
    results = json.loads((out / "eval" / "results.json").read_text())
    jsonschema.validate(results, schema())
    assert {row["verdict"] for row in results["rows"]} == {"lossless"}
    assert results["target"]["name"] == "tiny-target (tuned)"
    drift = results["target"]["drift"]
    assert drift["original"] == "tiny-target"
    assert drift["kl"][0] > 1e-6
    assert drift["loss_tuned"][0] != drift["loss_original"][0]

    # named by hand it is the same target, and as far from the original
    named = ["--target", f"{out}/target", "--drafter", f"{out}/drafter", "--no-audit"]
    assert main(["eval", *named, "--out", str(tmp_path / "named"), *MEASURED]) == 0
    found = json.loads((tmp_path / "named" / "results.json").read_text())
    assert found["target"]["drift"] == drift

    original = ["--target", SHALLOW, "--drafter", f"{out}/drafter"]
    assert main(["eval", *original, *MEASURED]) == 2
    message = capfd.readouterr().err
    assert "made for target 'tiny-target' as tuned to" in message
    assert "whose weights no run has changed" in message
    assert main(["audit", str(out), "--target", SHALLOW, *MEASURED]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lora", "full"])
def test_a_run_that_was_cut_ends_with_the_same_bits(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ["--checkpoint.keep", "3", "--tune.how", how, "--medusa2.self_distillation", "true"]
    for out in (whole, cut):
        train(out, *words, steps=3)
    for step in (3, 2):  # as if the run had been killed behind step 1
        (cut / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    train(cut, *words, steps=3)
    assert_same_weights(whole, cut, steps=3)
    names = ("config.json", "model.safetensors")
    for name in names:
        ours, theirs = (folder / "target" / name for folder in (whole, cut))
        assert ours.read_bytes() == theirs.read_bytes()
    assert main(["audit", str(cut), *MEASURED]) == 0
    assert f"{cut}/target decodes, and the audit compares with it" in capfd.readouterr().out


@pytest.mark.parametrize("how", ["lora", "full"])
def test_the_pre_flight_counts_what_moves(how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--data.limit_rows", "40", "--tune.how", how]
    assert main(["check", "medusa2-tiny", "--out", str(tmp_path), *words]) == 0
    # heads of 3.6 M beside adapters of 2.7 M, or beside the whole target of 12.1 M
    assert {"lora": "6.23 M", "full": "15.63 M"}[how] in capfd.readouterr().out


def test_a_target_too_coarse_to_move_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--tune.how", "full", "--target.dtype", "bf16"]
    assert main(["train", "medusa2-tiny", "--out", str(tmp_path), *words]) == 2
    assert "set target.dtype to fp32, or tune.how to lora" in capfd.readouterr().err
