"""Two runs and one folder: the second is refused, and what the first one writes is all its own."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest
from draftsmith.errors import RequestError
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.train import train
from draftsmith.storage import held, holder_of
from draftsmith.storage.held import hold
from helpers.reliability_tally import tally
from helpers.runs import killed_process
from helpers.runs.crashed_process import run
from helpers.runs.small_run import write_recipe

Captured = pytest.CaptureFixture[str]
# seconds after the first one at which another run is aimed at the folder, and its loop.seed
SECOND = [(0.0, 0), (0.0, 7), (1.5, 0), (1.5, 7)]


def contend(recipe: Path, out: Path) -> int:
    """Aim five runs at a folder; returns how many of the four others were not refused, or left a trace."""
    began = time.monotonic()
    runs = []
    for wait, seed in [(0.0, 0), *SECOND]:
        time.sleep(max(0.0, began + wait - time.monotonic()))
        words = ["train", str(recipe), "--out", str(out), "--loop.steps", "2000", "--loop.seed", str(seed)]
        runs.append((seed, killed_process.start(words)))
    while sum(process.is_alive() for _, process in runs) > 1:
        time.sleep(0.05)
    ((seed, first),) = [each for each in runs if each[1].is_alive()]
    while not list(out.glob("checkpoints/step-*")):
        assert first.is_alive()
        time.sleep(0.05)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGTERM)
    first.join()
    assert first.exitcode == 75
    assert load_recipe(str(out / "run.yaml")).recipe.loop.seed == seed
    for manifest in out.glob("checkpoints/*/manifest.json"):
        assert json.loads(manifest.read_text())["recipe"]["loop.seed"] == seed
    assert json.loads((out / "status.json").read_text())["state"] == "stopped"
    return sum(process.exitcode != 2 for _, process in runs if process is not first)


@pytest.mark.fault
@pytest.mark.parametrize("folders", [1, pytest.param(13, marks=pytest.mark.slow)])
def test_a_second_run_is_refused(folders: int, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    failed = sum(contend(recipe, tmp_path / f"run-{number}") for number in range(folders))
    tally("second run in one folder", tried=len(SECOND) * folders, failed=failed)
    assert failed == 0


@pytest.mark.slow
def test_the_message_says_who_where_and_since_when(tmp_path: Path, capfd: Captured) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "run").mkdir()
    with hold(tmp_path / "run"):
        for words in (["train", str(recipe)], ["check", str(recipe)]):
            assert main([*words, "--out", str(tmp_path / "run")]) == 2
            said = "".join(capfd.readouterr().err.split("\n"))
            assert f"is in use: process {os.getpid()} on " in said
            assert f", since {time.strftime('%Y-')}" in said
            assert "name another --out" in said
        with pytest.raises(RequestError, match="is in use"):
            train(str(recipe), out=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"], "refused, and nothing written"
    assert holder_of(tmp_path / "run") is None


def test_a_kill_leaves_a_line_that_is_in_nobodys_way(tmp_path: Path) -> None:
    def die() -> None:
        with hold(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)

    assert run(die) == -signal.SIGKILL
    assert json.loads((tmp_path / ".lock").read_text())["pid"] != os.getpid()
    assert holder_of(tmp_path) is None
    with hold(tmp_path) as locked:
        assert locked
        holder = holder_of(tmp_path)
        assert holder is not None
        assert holder.pid == os.getpid()


def test_a_copy_of_the_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    begun, begins = os.pipe()
    with hold(tmp_path):
        child = os.fork()
        if not child:
            os.write(begins, b"!")
            time.sleep(60)
            os._exit(0)
        os.read(begun, 1)
    try:
        assert holder_of(tmp_path) is None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(_file: object) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    kind = held.file_system(tmp_path)
    assert kind
    monkeypatch.setattr(held, "try_lock", none)
    with hold(tmp_path) as locked:
        assert not locked
    assert f"is on a file system without locks ({kind}: No locks available)" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(held, "file_system", lambda _path: "nfs4")
    with caplog.at_level(logging.INFO, "draftsmith"), hold(tmp_path):
        pass
    assert "is on nfs4: a run on another machine is kept out only if" in caplog.text
