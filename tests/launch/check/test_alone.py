"""Commands that decide by themselves: a launch of several processes is told so, before anything is read or written."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftsmith.launch.cli import main
from helpers.runs.launcher import ended

LAUNCHED = ["--target", "tiny", "--method", "prompt-lookup", "--target.tensor_parallel", "2"]
COMMANDS = {
    "tune": [*LAUNCHED, "--prompts", "stdlib"],
    "tree": ["runs/none", "--target.tensor_parallel", "2"],
    "chat": [*LAUNCHED, "--prompt", "def"],
    "quickstart": [],
}
SAID = "2 processes were launched, and {} "


@pytest.mark.parametrize("command", COMMANDS)
def test_several_processes_are_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([command, *COMMANDS[command]]) == 2
    said = capfd.readouterr().err
    assert SAID.format(command) in said
    assert f"start it in one process, by `draftsmith {command}`" in said
    assert "`eval`" in said or "`draftsmith eval`" in said
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.run
def test_a_real_team_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither waits for the other, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    done = ended("multi_cpu", "-m", "draftsmith.launch.cli", "tune", *COMMANDS["tune"])
    assert done.returncode
    assert SAID.format("tune") in done.stderr
    assert [*tmp_path.iterdir()] == []
