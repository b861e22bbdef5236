"""Whatever the clock, the zone, the folders and the language are: the same run, to the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from faults import surroundings
from faults.surroundings import ALL, Surroundings
from helpers.reliability_tally import tally
from helpers.runs.small_run import RECIPE, assert_same_weights, losses

STEPS = 3
SHORT = RECIPE.replace("steps: 24", f"steps: {STEPS}").replace("every_steps: 3}", "every_steps: 2}")


def called(around: Surroundings, folder: Path) -> tuple[Path, subprocess.CompletedProcess[bytes]]:
    """A short run there: its folder, and how it ended."""
    out = folder / around.folder / "run"
    spare = folder / "spare"
    spare.mkdir(parents=True)
    recipe = folder / around.folder / "small.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(SHORT, encoding="utf-8")
    command = [sys.executable, surroundings.__file__, around.clock, str(recipe), str(out)]
    return out, subprocess.run(command, capture_output=True, env=around.environment, cwd=spare)


def train_in(around: Surroundings, folder: Path) -> Path:
    out, done = called(around, folder)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"unexpected" not in done.stderr
    assert [*(folder / "spare").iterdir()] == [], "nothing is left where the command was given"
    return out


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_in(Surroundings(), tmp_path_factory.mktemp("control"))


def check_same_bits(around: Surroundings, control: Path, folder: Path) -> None:
    out = train_in(around, folder)
    assert_same_weights(out, control, STEPS)
    assert losses(out) == losses(control)
    tally("surroundings", tried=1)


@pytest.mark.slow
@pytest.mark.run
@pytest.mark.parametrize("name", ALL)
def test_surroundings(name: str, control: Path, tmp_path: Path) -> None:
    check_same_bits(ALL[name], control, tmp_path)


@pytest.mark.slow
@pytest.mark.run
def test_names_that_the_locale_cannot_say_are_refused_at_once(tmp_path: Path) -> None:
    """What writes tensors takes names in UTF-8 alone: without a word the run would fail at its first checkpoint."""
    out, done = called(Surroundings(surroundings.ASCII, folder=surroundings.EMOJI), tmp_path)
    assert done.returncode == 4
    assert b"PYTHONUTF8=1" in done.stderr
    assert not out.exists()


def test_there_are_twenty_five() -> None:
    assert len(ALL) == 25
    assert SHORT.count(f"steps: {STEPS}") == 1
