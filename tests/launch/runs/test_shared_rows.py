"""Runs of two processes that share every row: the numbers of one process, and on after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from draftsmith.launch.cli import main
from helpers.models.shallow_target import SHALLOW
from helpers.runs.launcher import launched, launching
from helpers.runs.method_runs import COMMON, LAUNCHER, RECIPES, assert_same_run
from helpers.runs.small_run import assert_same_weights, losses

pytestmark = [pytest.mark.slow, pytest.mark.run]
OWN = {
    "eagle": f"method: eagle\n{RECIPES['eagle']}",
    "eagle3": f"method: eagle3\n{RECIPES['eagle3']}",
    "mtp": f"method: mtp\n{RECIPES['mtp']}",
    "cached": f"method: eagle3\nfeatures: {{source: cache, dtype: fp32}}\n{RECIPES['eagle3']}",
}
SHARED = ["--loop.context_parallel", "2"]


def write(folder: Path, name: str, common: str = COMMON) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(f"name: run\ntarget: {{path: {SHALLOW}}}\n{OWN[name]}{common}")
    return str(path)


def test_the_same_run_as_in_one_process(tmp_path: Path) -> None:
    common = COMMON.replace("loop: {", "loop: {context_parallel: 2, ")
    (tmp_path / "two").mkdir()
    launched("multi_cpu", LAUNCHER, str(tmp_path), *(write(tmp_path / "two", name, common) for name in OWN))
    for name in OWN:
        assert main(["train", write(tmp_path, name), "--out", str(tmp_path / "alone" / name)]) == 0
        assert_same_run(tmp_path / name, tmp_path / "alone" / name)


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    common = COMMON.replace("steps: 6,", "steps: 30,").replace("every_steps: 6", "every_steps: 3, keep: 99")
    recipe = write(tmp_path, "eagle3", common)
    words = ["-m", "draftsmith.launch.train", recipe, *SHARED, "--out"]
    launched("multi_cpu", *words, str(tmp_path / "whole"))
    out = tmp_path / "killed"
    launcher = launching("multi_cpu", *words, str(out), to=subprocess.DEVNULL)
    while not list(out.glob("checkpoints/step-*")):
        assert launcher.poll() is None
        time.sleep(0.05)
    workers = psutil.Process(launcher.pid).children(recursive=True)
    (chosen,) = [each for each in workers if each.environ().get("RANK") == "1"]
    os.kill(chosen.pid, signal.SIGKILL)
    assert launcher.wait() != 0
    assert not (out / "checkpoints" / "step-00000030").exists()
    launched("multi_cpu", *words, str(out))
    assert_same_weights(out, tmp_path / "whole", 30)
    assert losses(out) == losses(tmp_path / "whole")


def test_one_process_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", write(tmp_path, "eagle3"), "--out", str(tmp_path / "run"), *SHARED]) == 2
    assert "loop.context_parallel is 2, and 1 process is no multiple of it; launch 2 " in capsys.readouterr().err
