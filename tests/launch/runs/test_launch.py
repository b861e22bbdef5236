"""One recipe under every launch configuration: the same losses in one process and in two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from draftsmith.launch.cli import main
from helpers.reliability_tally import tally
from helpers.runs.launcher import launched, launching
from helpers.runs.small_run import drafter, losses, write_recipe

STEPS = 8


def launch(config: str, folder: Path, *words: str) -> tuple[Path, str]:
    """Run the small recipe with `accelerate launch` and return the run's folder."""
    out = folder / config
    recipe = str(write_recipe(folder))
    steps = ["--loop.steps", str(STEPS)]
    message = launched(config, "-m", "draftsmith.launch.train", recipe, "--out", str(out), *steps, *words)
    return out, message


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    # in this process: only the other side has to be launched
    assert main(["train", str(write_recipe(folder)), "--out", str(folder / "cpu"), "--loop.steps", str(STEPS)]) == 0
    return folder / "cpu"


@pytest.mark.run
@pytest.mark.parametrize(
    "config", ["multi_cpu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero2", "zero3"))]
)
def test_two_processes_train_the_same(config: str, alone: Path, tmp_path: Path) -> None:
    """Row order and loss do not depend on how the batch is spread; rounding alone differs."""
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    out, message = launch(config, tmp_path)
    assert (
        "2 processes: " + {"multi_cpu": "MULTI_CPU", "zero2": "DEEPSPEED ZeRO-2", "zero3": "DEEPSPEED ZeRO-3"}[config]
        in message
    )
    compiled = Path(os.environ["XDG_CACHE_HOME"]) / "torch_extensions"
    assert not compiled.exists(), "DeepSpeed compiled what training does not call"
    one, two = losses(alone), losses(out)
    assert one.keys() == two.keys() == set(range(1, STEPS + 1))
    for step, loss in one.items():
        assert two[step] == pytest.approx(loss, rel=1e-4), step
    mine, theirs = drafter(out), drafter(alone)
    for name, weight in theirs.items():
        assert mine[name].shape == weight.shape
        assert (mine[name] - weight).norm() < 0.05 * weight.norm(), name


@pytest.mark.run
@pytest.mark.slow
def test_torchrun_trains_the_same(alone: Path, tmp_path: Path) -> None:
    """Its processes find each other by what it tells them; accelerate takes that for its own launch."""
    words = ["--nproc_per_node", "2", "-m", "draftsmith.launch.train", str(write_recipe(tmp_path))]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "--out", str(tmp_path / "run")]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, "--loop.steps", str(STEPS)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes: MULTI_CPU" in done.stdout + done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.run
@pytest.mark.slow  # test_setup.py has the refusal itself
def test_deepspeed_is_never_left_out_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(AssertionError, match="ACCELERATE_USE_CPU makes accelerate leave it out"):
        launch("zero2", tmp_path)


@pytest.mark.run
@pytest.mark.slow  # test_check.py has the refusal itself
def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="loop.batch_rows is 8, which is not a multiple"):
        launch("multi_cpu", tmp_path, "--loop.micro_rows", "3")


def signalled(folder: Path, rank: int, number: signal.Signals) -> tuple[Path, dict[str, str]]:
    """A run of two processes, one of which gets a signal behind its first steps; how it says that it ended."""
    out = folder / "run"
    words = ["-m", "draftsmith.launch.train", str(write_recipe(folder)), "--out", str(out), "--loop.steps", "2000"]
    launcher = launching("multi_cpu", *words)
    while len(losses(out) if (out / "metrics.jsonl").is_file() else []) < 3:
        assert launcher.poll() is None
        time.sleep(0.05)
    workers = psutil.Process(launcher.pid).children(recursive=True)
    (chosen,) = [each for each in workers if each.environ().get("RANK") == str(rank)]
    chosen.send_signal(number)
    launcher.wait()
    assert launcher.returncode != 0
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in workers)
    return out, json.loads((out / "status.json").read_text())


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT"])
def test_a_signal_to_one_of_two_processes_stops_both(name: str, rank: int, tmp_path: Path) -> None:
    out, status = signalled(tmp_path, rank, signal.Signals[name])
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert (out / "checkpoints" / f"step-{max(losses(out)):08d}").is_dir()
    tally("signals", tried=1)


@pytest.mark.fault
@pytest.mark.slow
def test_a_second_launch_is_refused_and_leaves_the_first_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["-m", "draftsmith.launch.train", str(write_recipe(tmp_path)), "--out", str(out), "--loop.steps", "2000"]
    first = launching("multi_cpu", *words)
    while not list(out.glob("checkpoints/step-*")):
        assert first.poll() is None
        time.sleep(0.05)
    second = launching("multi_cpu", *words, "--loop.seed", "7", port=29511, to=subprocess.PIPE)
    said = second.communicate()[1]
    assert second.returncode != 0
    assert "these values differ: loop.seed" in said or "is in use: process" in said
    third = launching("multi_cpu", *words, port=29512, to=subprocess.PIPE)
    assert "is in use: process" in third.communicate()[1]
    assert json.loads((out / "status.json").read_text())["state"] == "running"
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    first.wait()
    assert json.loads((out / "status.json").read_text())["state"] == "stopped"
    tally("second run in one folder", tried=2)
