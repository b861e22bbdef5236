"""Runs of two processes, under DeepSpeed too, go on from any checkpoint to the same bits."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import psutil
import pytest
from draftsmith.launch.cli import main
from draftsmith.trainers.loop import checkpoint
from faults import deepspeed_steps, stalls
from helpers.reliability_tally import tally
from helpers.runs import launcher
from helpers.runs.launcher import ended, launched
from helpers.runs.small_run import RECIPE, losses, write_recipe
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.run]
CUTS = (3, 12, 21)  # behind these steps; an epoch ends within
CONFIGS = ["multi_cpu", "zero2", "zero3"]


def needs_deepspeed(config: str) -> None:
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")


def find_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launched processes import what tests import."""
    places = [str(Path(launcher.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))


def cut_behind(run: Path, out: Path, step: int) -> None:
    """A copy of a finished run as a kill behind that step's checkpoint would have left it."""
    shutil.copytree(run, out, ignore=shutil.ignore_patterns("drafter", "status.json"))
    for saved in (out / "checkpoints").iterdir():
        if int(saved.name.removeprefix("step-")) > step:
            shutil.rmtree(saved)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_kind_of_group_goes_on_to_the_same_bits(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_deepspeed(config)
    recipes = [write_recipe(tmp_path).rename(tmp_path / "whole.yaml")]
    text = RECIPE.replace("every_steps: 3}", "every_steps: 3, keep: 20}")
    # every probe has its checkpoint, from which a draft that is gone is exported anew
    text = text.replace("probe: {every_steps: 8", "probe: {every_steps: 6")
    assert text.count("every_steps: 6") == text.count("keep: 20") == 1
    recipes += [tmp_path / f"cut-{step}.yaml" for step in CUTS]
    for recipe in recipes:
        recipe.write_text(text)
    launched(config, launcher.__file__, str(tmp_path), str(recipes[0]))
    for step in CUTS:
        cut_behind(tmp_path / "whole", tmp_path / f"cut-{step}", step)
    launched(config, launcher.__file__, str(tmp_path), *map(str, recipes[1:]))
    name = "drafter/model.safetensors"
    for step in CUTS:
        out = tmp_path / f"cut-{step}"
        mine, theirs = load_file(out / name), load_file(tmp_path / "whole" / name)
        assert all(bool((mine[key] == theirs[key]).all()) for key in theirs), step
        assert losses(out) == losses(tmp_path / "whole")
    if config == "zero3":
        check_other_groups_are_refused(tmp_path, capsys)
    tally("resume of several processes", tried=len(CUTS))


def check_other_groups_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed's pieces are for as many processes under DeepSpeed: others are told what is there and how to go on."""
    cut_behind(folder / "whole", folder / "alone", 3)
    saved = folder / "alone" / "checkpoints" / "step-00000003"
    assert main(["train", str(folder / "whole.yaml"), "--out", str(folder / "alone")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{saved} was written under DeepSpeed (2 processes), and this run is without it" in said
    assert "launch with the same configuration (launch/configs/zero2.yaml or zero3.yaml) to go on" in said
    cut_behind(folder / "whole", folder / "more" / "whole", 3)
    saved = folder / "more" / "whole" / "checkpoints" / "step-00000003"
    done = ended("zero3", launcher.__file__, str(folder / "more"), str(folder / "whole.yaml"), processes=4)
    assert json.loads((folder / "more" / "whole" / "status.json").read_text())["exit_code"] == 2
    said = " ".join(done.stderr.split())
    assert f"{saved} holds DeepSpeed's state in 2 pieces, and this run has 4 processes" in said
    assert "launch with --num_processes 2 to go on" in said
    assert saved.is_dir()


def losses_of_stages(folder: Path, stages: list[tuple[str, int]], step: int = 3) -> list[dict[int, float]]:
    """Losses of one run that goes on under each configuration and number of processes, `step` steps after the last.

    Each stage runs to the end; the next one goes on from a checkpoint in the middle, as after a kill.
    """
    text = RECIPE.replace("steps: 24", f"steps: {step * len(stages)}")
    text = text.replace("every_steps: 3}", f"every_steps: {step}, keep: 9}}")
    recipe = folder / "whole.yaml"
    recipe.write_text(text)
    found = []
    for number, (config, processes) in enumerate(stages):
        out = folder / f"stage-{number}"
        if number:
            cut_behind(folder / f"stage-{number - 1}" / "whole", out / "whole", number * step)
            assert not [*(out / "whole" / "checkpoints").glob("*/deepspeed")], "it is whole"
        launched(config, launcher.__file__, str(out), str(recipe), processes=processes)
        found.append(losses(out / "whole"))
    return found


def check_stages(found: list[dict[int, float]], step: int = 3) -> None:
    """A stage keeps what was before it to the bit; its own losses are those of the first one's processes."""
    first, *others = found
    far = [max(abs(value / first[at] - 1) for at, value in each.items()) for each in others]
    print([f"{value:.1e}" for value in far])
    assert all(each.keys() == set(range(1, step * len(found) + 1)) for each in found)
    for number, (before, each) in enumerate(itertools.pairwise(found), start=1):
        assert all(each[at] == before[at] for at in range(1, number * step + 1))
        assert each[number * step + 1] == pytest.approx(before[number * step + 1], rel=1e-6)
    assert max(far) < 1e-5


def test_two_one_and_four_processes(tmp_path: Path) -> None:
    check_stages(losses_of_stages(tmp_path, [("multi_cpu", 2), ("cpu", 1), ("multi_cpu", 4)]))


def test_zero2_goes_on_in_another_number_of_processes(tmp_path: Path) -> None:
    """Its checkpoints are whole: more processes read them, one without DeepSpeed too, and two those of that one."""
    needs_deepspeed("zero2")
    check_stages(losses_of_stages(tmp_path, [("zero2", 2), ("zero2", 4), ("cpu", 1), ("zero2", 2)]))


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
