"""Runs of two processes, under DeepSpeed too, go on from any checkpoint to the same bits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import launching
import psutil
import pytest
from draftsmith.launch.cli import main
from draftsmith.trainers.loop import checkpoint
from faults import deepspeed_steps, stalls
from launching import ended, launched
from safetensors.torch import load_file
from small_run import RECIPE, losses, write_recipe
from tally import tally

pytestmark = [pytest.mark.slow, pytest.mark.run]
CUTS = (3, 12, 21)  # behind these steps; an epoch ends within
CONFIGS = ["multi_cpu", "zero2", "zero3"]


def needs_deepspeed(config: str) -> None:
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")


def find_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launched processes import what tests import."""
    places = [str(Path(launching.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))


def cut_behind(run: Path, out: Path, step: int) -> None:
    """A copy of a finished run as a kill behind that step's checkpoint would have left it."""
    shutil.copytree(run, out, ignore=shutil.ignore_patterns("drafter", "status.json"))
    for saved in (out / "checkpoints").iterdir():
        if int(saved.name.removeprefix("step-")) > step:
            shutil.rmtree(saved)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_kind_of_group_goes_on_to_the_same_bits(config: str, tmp_path: Path) -> None:
    needs_deepspeed(config)
    recipes = [write_recipe(tmp_path).rename(tmp_path / "whole.yaml")]
    text = RECIPE.replace("every_steps: 3}", "every_steps: 3, keep: 20}")
    # every probe has its checkpoint, from which a draft that is gone is exported anew
    text = text.replace("probe: {every_steps: 8", "probe: {every_steps: 6")
    assert text.count("every_steps: 6") == text.count("keep: 20") == 1
    recipes += [tmp_path / f"cut-{step}.yaml" for step in CUTS]
    for recipe in recipes:
        recipe.write_text(text)
    launched(config, launching.__file__, str(tmp_path), str(recipes[0]))
    for step in CUTS:
        cut_behind(tmp_path / "whole", tmp_path / f"cut-{step}", step)
    launched(config, launching.__file__, str(tmp_path), *map(str, recipes[1:]))
    name = "drafter/model.safetensors"
    for step in CUTS:
        out = tmp_path / f"cut-{step}"
        mine, theirs = load_file(out / name), load_file(tmp_path / "whole" / name)
        assert all(bool((mine[key] == theirs[key]).all()) for key in theirs), step
        assert losses(out) == losses(tmp_path / "whole")
    if config == "zero3":
        check_other_groups_are_refused(tmp_path)
    tally("resume of several processes", tried=len(CUTS))


def check_other_groups_are_refused(folder: Path) -> None:
    """DeepSpeed's pieces are for as many processes under DeepSpeed, and one process says so."""
    cut_behind(folder / "whole", folder / "alone", 3)
    assert main(["train", str(folder / "whole.yaml"), "--out", str(folder / "alone")]) == 2


def test_zero2_goes_on_in_another_number_of_processes(tmp_path: Path) -> None:
    """Its checkpoints are whole: one process without DeepSpeed reads them, two under ZeRO-2 read that one's."""
    needs_deepspeed("zero2")
    (tmp_path / "whole.yaml").write_text(
        RECIPE.replace("steps: 24", "steps: 9").replace("every_steps: 3}", "every_steps: 3, keep: 9}")
    )
    recipe = str(tmp_path / "whole.yaml")
    launched("zero2", launching.__file__, str(tmp_path), recipe)
    cut_behind(tmp_path / "whole", tmp_path / "alone", 3)
    assert not (tmp_path / "alone" / "checkpoints" / "step-00000003" / "deepspeed").exists()
    assert main(["train", recipe, "--out", str(tmp_path / "alone")]) == 0
    cut_behind(tmp_path / "alone", tmp_path / "back" / "whole", 6)
    launched("zero2", launching.__file__, str(tmp_path / "back"), recipe)
    expected = losses(tmp_path / "whole")
    far = {
        out.name: max(abs(value / expected[step] - 1) for step, value in losses(out).items())
        for out in (tmp_path / "alone", tmp_path / "back" / "whole")
    }
    print(far)
    assert max(far.values()) < 1e-5
    tally("resume of several processes", tried=2)


@pytest.mark.parametrize("config", ["zero2", "zero3"])
def test_deepspeed_leaves_out_a_step_that_is_not_finite(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_deepspeed(config)
    find_helpers(monkeypatch)
    message = launched(config, "-m", "faults.deepspeed_steps", str(tmp_path))
    assert "step 2 skipped: loss or gradient is not finite" in message
    assert (tmp_path / "done-0").is_file()
    assert (tmp_path / "done-1").is_file()
    tally("non-finite steps", tried=len(deepspeed_steps.POISONED))


@pytest.mark.parametrize(("config", "piece"), [("zero2", "fp32"), ("zero3", "fp32"), ("zero3", "copy")])
def test_a_weight_that_turns_non_finite_reaches_no_checkpoint_of_deepspeed(
    config: str, piece: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_deepspeed(config)
    find_helpers(monkeypatch)
    launched(config, "-m", "faults.deepspeed_steps", str(tmp_path), "1", piece)
    step = deepspeed_steps.BROKEN + 1
    told = [(tmp_path / f"failed-{rank}").read_text() for rank in (0, 1)]
    assert f"behind step {step} a weight of another process is not finite" in told[0]
    assert "no checkpoint is written, older ones are whole" in told[1]
    newest = checkpoint.newest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{step - 1:08d}"
    tally("non-finite weights", tried=1)


@pytest.mark.parametrize("how", [stalls.STOP, stalls.KILL])
@pytest.mark.parametrize("place", stalls.PLACES)
def test_a_launcher_leaves_no_process(place: str, how: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the one that does not answer, once the other has ended."""
    find_helpers(monkeypatch)
    done = ended("multi_cpu", "-m", "faults.stalls", str(tmp_path), place, str(int(how)))
    assert done.returncode == 1
    if how == stalls.STOP:
        assert "process 1 of 2 (counted from 0) does not answer" in done.stderr
    left = [rank for rank in (0, 1) if psutil.pid_exists(int((tmp_path / f"pid-{rank}").read_text()))]
    assert left == []
    tally("stopped processes", tried=1)
