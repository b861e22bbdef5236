"""A second signal, or a kill, while the checkpoint is written that a first one asked for."""

from __future__ import annotations

import itertools
import signal
from functools import partial
from pathlib import Path

import pytest
from draftsmith.errors import Stopped
from draftsmith.trainers.loop import checkpoint, interruptions
from faults import toy
from helpers.reliability_tally import tally
from helpers.runs.crashed_process import Point, points, run, send

SAVED, ASKED = 4, 5  # a checkpoint is behind the one step, and the other is being written
EVERY = 2
ENDINGS = [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]


def go_on(out: Path) -> None:
    """To the end, as the next start does it."""
    checkpoint.delete_halves(out / "checkpoints", alone=True)
    toy.run(toy.loop_in(out, every=EVERY))


def stopped(out: Path, first: signal.Signals = signal.SIGTERM) -> int:
    """The exit code of a run that a first signal asks to stop."""
    interruptions._SAME = -1.0  # what comes at once is a second signal too
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    loop = toy.loop_in(out, every=EVERY)
    try:
        toy.run(loop, stop_at=ASKED, sent=first)
    except Stopped:
        return Stopped.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert run(partial(go_on, out)) == 0
    return out


def operations(folder: Path) -> list[Point]:
    """Every file operation of the save that a signal asks for, and of the deletions behind it."""
    found = points(folder, lambda: stopped(folder) - Stopped.exit_code)
    found = [each for each in found if each.half is None and "checkpoints" in each.what]
    first = next(at for at, each in enumerate(found) if f"step-{ASKED:08d}" in each.what)
    assert len(found[first:]) >= 20, found
    return found[first:]


def ends_at_once(out: Path, whole: Path, point: Point, second: signal.Signals) -> None:
    """One of the two checkpoints is whole, and the next start goes on from it to the same bits."""
    out.mkdir()
    first = signal.SIGTERM if second == signal.SIGKILL else second
    code = send(out, partial(stopped, out, first), point, second)
    assert code == (130 if second == signal.SIGINT else -second)
    newest = checkpoint.newest(out / "checkpoints")
    assert newest is not None
    assert newest.name in (f"step-{SAVED:08d}", f"step-{ASKED:08d}")
    assert run(partial(go_on, out)) == 0
    assert toy.state_files(out) == toy.state_files(whole)
    assert toy.losses(out) == toy.losses(whole)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000010", "step-00000012"]


@pytest.mark.fault
@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_a_second_signal_while_the_checkpoint_is_written(every: int, whole: Path, tmp_path: Path) -> None:
    endings = itertools.cycle(ENDINGS)
    found = operations(tmp_path / "seen")
    cases = [(point, next(endings)) for point in found for _ in range(3)][::every]
    for number, (point, second) in enumerate(cases):
        try:
            ends_at_once(tmp_path / f"run-{number}", whole, point, second)
        except AssertionError as error:
            tally("second signal in a save", tried=number + 1, failed=1)
            raise AssertionError(f"{second.name} before: {point.what}") from error
    tally("second signal in a save", tried=len(cases))
