"""Which process of a launch speaks for it, and whose word stays in `status.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftsmith.errors import EnvironmentFailure, Stopped
from draftsmith.launch.check.resume import held_folder
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.train.run import Status
from draftsmith.storage import holder_of, is_first

NAMES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def told(folder: Path) -> tuple[str, int]:
    found = json.loads((folder / "status.json").read_text())
    return found["state"], found["exit_code"]


@pytest.mark.parametrize("name", NAMES)
def test_any_launcher_names_the_first_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one holds the folder and writes in it for all."""
    assert is_first()
    resolved = load_recipe("distill-tiny")
    for number in ("1", "0"):
        monkeypatch.setenv(name, number)
        with held_folder(tmp_path, resolved, "auto"):
            Status(tmp_path).write("running", None)
            assert (holder_of(tmp_path) is not None) == (tmp_path / "status.json").exists() == (number == "0")


def in_launch(port: str, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.setenv("RANK", rank)


def test_a_stop_is_not_overwritten_by_what_fails_in_its_wake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_launch("1", "0", monkeypatch)
    Status(tmp_path).fail(Stopped("SIGTERM"))
    in_launch("1", "1", monkeypatch)
    Status(tmp_path).fail(EnvironmentFailure("process 0 does not answer"))
    assert told(tmp_path) == ("stopped", 75)


@pytest.mark.parametrize("earlier", [Stopped("SIGTERM"), EnvironmentFailure("no room")])
def test_the_word_of_an_earlier_launch_is_stale(
    earlier: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_launch("1", "0", monkeypatch)
    Status(tmp_path).fail(earlier)
    in_launch("2", "1", monkeypatch)
    Status(tmp_path).fail(RuntimeError("out of memory"))
    assert told(tmp_path) == ("failed", 5)
