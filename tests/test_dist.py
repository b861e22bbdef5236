"""What a release holds: the package with its recipes and target, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import draftsmith
import pytest
from helpers.benchmark_scripts import load
from setuptools import build_meta

ROOT = Path(draftsmith.__file__).parent


@pytest.fixture(scope="module")
def dist() -> ModuleType:
    return load("dist", ROOT / ".ci")


def test_faults_of_a_release(dist: ModuleType) -> None:
    right = [f"{each}x" if each.endswith("/") else each for each in dist.NEEDED]
    assert list(dist.faults_of(dist.MOST_BYTES, right)) == []
    assert list(dist.faults_of(dist.MOST_BYTES + 1_000_000, right)) == ["25.0 MB; expected at most 24"]
    assert list(dist.faults_of(1, [*right, "tests/test_house.py"])) == [
        "holds tests/test_house.py, which is no part of a release"
    ]
    assert list(dist.faults_of(1, [*right, "eval/__pycache__/x.pyc"])) == [
        "holds eval/__pycache__/x.pyc, which is no part of a release"
    ]
    assert list(dist.faults_of(1, right[1:])) == ["lacks recipes/eagle-tiny.yaml"]


@pytest.mark.slow
def test_sdist_and_wheel_hold_the_package(dist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, tmp_path / "tree" / name)
    monkeypatch.chdir(tmp_path / "tree")
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    for make in (build_meta.build_sdist, build_meta.build_wheel):
        file = tmp_path / make(str(tmp_path))
        assert list(dist.faults_of(file.stat().st_size, dist.names_in(file))) == []
