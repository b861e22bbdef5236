"""The benchmark of samplers, as far as a CPU can check it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.benchmark_scripts import SCRIPTS

SCRIPT = SCRIPTS / "samplers.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)


@pytest.mark.slow
def test_tiny_runs_to_its_end(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = run("--tiny", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny CPU mode: checks the script, measures nothing\n")
    found = json.loads(out.read_text())
    assert found["note"] == "tiny CPU mode: checks the script, measures nothing"
    assert [(row["batch"], row["vocabulary"]) for row in found["samplers"]] == [(1, 61), (2, 61), (1, 128), (2, 128)]
    for row in found["samplers"]:
        assert row["torch warp"] > 0
        assert row["flashinfer token"] in ("not installed", "needs CUDA")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_without_cuda_it_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no CUDA device" in done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_it_runs_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert run("--out", str(out)).returncode == 0
    for row in json.loads(out.read_text())["samplers"]:
        assert row["torch warp, replayed"] > 0
