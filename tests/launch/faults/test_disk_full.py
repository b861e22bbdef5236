"""A disk that is full, at any write: one message, older checkpoints as they were, the same bits afterwards."""

from __future__ import annotations

import json
import resource
import shutil
from functools import partial
from pathlib import Path

import pytest
from draftsmith.launch.cli import main
from draftsmith.storage import fault
from helpers.reliability_tally import tally
from helpers.runs.crashed_process import Point, fill_disk, points, run
from helpers.runs.small_run import assert_same_weights, losses, write_recipe

STEPS = 6
FEW = [
    "--loop.steps",
    str(STEPS),
    "--checkpoint.every_steps",
    "2",
    "--checkpoint.keep",
    "3",
    "--loop.validate_every",
    "6",
]
FEW += ["--probe.every_steps", "6"]
CASES = 10


def train(folder: Path, out: Path) -> int:
    return main(["train", str(folder / "small.yaml"), "--out", str(out), *FEW])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, its whole run, and `begun`: the run as it was behind its first checkpoint."""
    folder = tmp_path_factory.mktemp("disk")
    write_recipe(folder)
    assert run(lambda: train(folder, folder / "whole")) == 0
    begun = folder / "begun"
    shutil.copytree(folder / "whole", begun)
    shutil.rmtree(begun / "drafter")
    for later in ("step-00000004", "step-00000006"):
        shutil.rmtree(begun / "checkpoints" / later, ignore_errors=True)
    return folder


def begun_of(place: Path, out: Path) -> dict[str, bytes]:
    """A copy of the run that has begun; returns its checkpoint."""
    shutil.copytree(place / "begun", out)
    return content(out)


def content(out: Path) -> dict[str, bytes]:
    saved = out / "checkpoints" / "step-00000002"
    assert fault(saved) is None
    return {path.name: path.read_bytes() for path in saved.iterdir()}


def ends_well(place: Path, out: Path, before: dict[str, bytes]) -> None:
    """What was there is there, and the next run ends as if nothing had been."""
    assert content(out) == before
    assert run(partial(train, place, out)) == 0
    assert_same_weights(out, place / "whole", STEPS)
    assert losses(out) == losses(place / "whole")
    assert [path.name for path in out.rglob(".*")] == [".lock"]


def limited(place: Path, out: Path, size: int) -> int:
    """The exit code where no file may be larger than `size` bytes."""

    def act() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return train(place, out)

    return run(act)


@pytest.mark.fault
@pytest.mark.parametrize("cases", [1, pytest.param(CASES, marks=pytest.mark.slow)])
def test_a_limit_on_the_size_of_files(cases: int, place: Path, tmp_path: Path) -> None:
    largest = max(path.stat().st_size for path in (place / "whole").rglob("*") if path.is_file())
    for number in range(cases):
        size = int(largest * 0.9 ** (1 + 8 * number))
        out = tmp_path / f"run-{number}"
        before = begun_of(place, out)
        assert limited(place, out, size) == 4
        status = json.loads((out / "status.json").read_text())
        assert (status["state"], status["exit_code"]) in {("failed", 4), ("finished", 0)}
        ends_well(place, out, before)
        tally("disk full", tried=1)


@pytest.mark.fault
@pytest.mark.slow
def test_a_disk_that_is_full_from_some_write_on(place: Path, tmp_path: Path) -> None:
    begun_of(place, tmp_path / "count")
    found = [each for each in points(tmp_path / "count", partial(train, place, tmp_path / "count"))]
    writes = [each for each in found if each.half is None and each.what.startswith(("write", "mkdir", "flush"))]
    assert len(writes) > 2 * CASES
    for number in range(CASES):
        chosen: Point = writes[(2 * number + 1) * len(writes) // (2 * CASES)]
        out = tmp_path / f"run-{number}"
        before = begun_of(place, out)
        assert fill_disk(out, partial(train, place, out), chosen) == 4, chosen
        ends_well(place, out, before)
        tally("disk full", tried=1)
