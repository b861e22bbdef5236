"""SIGKILL at random moments, SIGTERM: the resumed run ends with the undisturbed run's weights."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.models.shallow_target import SHALLOW
from helpers.reliability_tally import tally
from helpers.runs.method_runs import COMMON, RECIPES
from helpers.runs.small_run import STEPS, assert_same_weights, losses, train, write_recipe

# a server that has torch imported already: each run is a process of its own, started at once
_SPAWN = multiprocessing.get_context("forkserver")
_SPAWN.set_forkserver_preload(["draftsmith.trainers.distill", "draftsmith.eval.measure.probe"])

# drafters of many tokens a pass, and MTP modules: each with random numbers or weights of its own kind to keep
PARALLEL = ("pard", "mtp", "peagle", "dflash", "dspark", "dflash2")
EVERY, LAST = 6, 12  # steps between checkpoints, as `COMMON` has them, and of the run


def start(recipe: Path, out: Path) -> multiprocessing.process.BaseProcess:
    process = _SPAWN.Process(target=train, args=(recipe, out))
    process.start()
    return process


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, float]:
    """Recipe, finished run, and how long it took."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = write_recipe(folder)
    for name in ("first", "run"):  # the first fills the cache of tokenised data
        began = time.monotonic()
        process = start(recipe, folder / name)
        process.join()
        assert process.exitcode == 0
    assert_same_weights(folder / "first", folder / "run")
    return recipe, folder / "run", time.monotonic() - began


def kill_often(kills: int, undisturbed: tuple[Path, Path, float], folder: Path) -> None:
    recipe, whole, seconds = undisturbed
    moments = random.Random(kills)  # noqa: S311
    landed = runs = 0
    counted = 0
    while landed < kills:
        out, runs = folder / f"run-{runs}", runs + 1
        finished = False
        while not finished:
            process = start(recipe, out)
            process.join(moments.uniform(0, seconds) if landed < kills else None)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                landed += 1
            process.join()
            finished = process.exitcode == 0
            assert process.exitcode in (0, -signal.SIGKILL)
        assert_same_weights(out, whole)
        assert losses(out) == losses(whole)
        assert [path.name for path in out.rglob(".*")] == [".lock"]
        tally("kills", tried=landed - counted)
        counted = landed
        shutil.rmtree(out)


@pytest.mark.fault
def test_a_kill(undisturbed: tuple[Path, Path, float], tmp_path: Path) -> None:
    kill_often(1, undisturbed, tmp_path)


@pytest.mark.fault
@pytest.mark.slow
def test_five_hundred_kills(undisturbed: tuple[Path, Path, float], tmp_path: Path) -> None:
    kill_often(500, undisturbed, tmp_path)


def steps_logged(run: Path) -> list[dict[str, float]]:
    """What whole lines say of steps, clocks included."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [line for line in map(json.loads, lines) if line["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("method", PARALLEL)
def test_a_kill_between_checkpoints(method: str, tmp_path: Path) -> None:
    """Every family of these: what was learnt behind the last checkpoint is learnt again, to the bit."""
    common = COMMON.replace("loop: {steps: 6,", f"loop: {{steps: {LAST},")
    recipe = tmp_path / f"{method}.yaml"
    recipe.write_text(f"method: {method}\nname: {method}\ntarget: {{path: {SHALLOW}}}\n{RECIPES[method]}{common}")
    whole, out = tmp_path / "whole", tmp_path / "run"
    process = start(recipe, whole)
    process.join()
    assert process.exitcode == 0
    process = start(recipe, out)
    while process.is_alive() and len(steps_logged(out)) <= EVERY:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    killed = steps_logged(out)
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == [f"step-{EVERY:08d}"]
    assert EVERY < len(killed) < LAST, "the kill has to cost steps"
    process = start(recipe, out)
    process.join()
    assert process.exitcode == 0
    # with the same clocks: they were not made again
    assert steps_logged(out)[:EVERY] == killed[:EVERY]
    assert losses(out) == losses(whole)
    assert_same_weights(out, whole, LAST)
    tally("kills", tried=1)


@pytest.mark.slow
@pytest.mark.fault
def test_terminate(undisturbed: tuple[Path, Path, float], tmp_path: Path) -> None:
    """SIGTERM to the real command: a checkpoint, exit code 75, and the way on."""
    recipe, whole, _ = undisturbed
    out = tmp_path / "run"
    command = [sys.executable, "-m", "draftsmith.launch.train", str(recipe), "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not (out / "metrics.jsonl").is_file() or "\n" not in (out / "metrics.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    message = process.communicate()[1]
    assert process.returncode == 75, message
    assert "--resume auto" in message
    assert "Traceback" not in message
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    stopped_at = max(losses(out))
    assert stopped_at < STEPS
    assert (out / "checkpoints" / f"step-{stopped_at:08d}").is_dir()
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert_same_weights(out, whole)


@pytest.mark.fault
def test_another_recipe_is_refused(undisturbed: tuple[Path, Path, float], capfd: pytest.CaptureFixture[str]) -> None:
    """A run folder goes on with the values it began with, or not at all."""
    from draftsmith.launch.cli import main

    recipe, whole, _ = undisturbed
    assert main(["train", str(recipe), "--out", str(whole), "--optimizer.lr", "1"]) == 2
    assert "optimizer.lr" in capfd.readouterr().err
