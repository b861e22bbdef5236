"""A signal at any moment ends a run where it can be gone on with, and says so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash import run
from draftsmith.errors import Stopped
from draftsmith.launch.cli import main
from draftsmith.trainers.loop.loop import Loop
from draftsmith.trainers.loop.signals import Interrupted, interrupt_on_signal, stop_on_signal
from draftsmith.trainers.loop.snapshot import Snapshots
from draftsmith.trainers.loop.step import Steps
from draftsmith.trainers.teacher import frozen
from small_run import assert_same_weights, losses, write_recipe
from tally import tally

STEPS = 8
FEW = ["--loop.steps", str(STEPS), "--checkpoint.every_steps", "3", "--loop.validate_every", "4"]
FEW += ["--probe.every_steps", "4"]
# where the signal comes: what is called then, and at which of its calls
STAGES: dict[str, tuple[Any, str, int]] = {
    "preparation": (frozen, "prepare_rows", 1),
    "step": (Steps, "update", 2),
    "validation": (Loop, "validate", 1),
    "save": (Snapshots, "_fill", 1),
    "export": (Loop, "export", 1),
}
SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"]
ALL = [(name, stage) for name in SIGNALS for stage in STAGES]
FAST = [("SIGHUP", "step"), ("SIGUSR1", "save")]


def words(folder: Path, out: Path) -> list[str]:
    return ["train", str(folder / "small.yaml"), "--out", str(out), *FEW]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, and its run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("signals")
    write_recipe(folder)
    assert run(lambda: main(words(folder, folder / "whole"))) == 0
    return folder


def signalled(command: list[str], number: signal.Signals, stage: str) -> int:
    """The exit code of a command that gets a signal at a stage."""
    owner, name, which = STAGES[stage]

    def act() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        real, calls = getattr(owner, name), []

        def call(*args: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == which:
                os.kill(os.getpid(), number)
            return real(*args, **more)

        setattr(owner, name, call)
        return main(command)

    return run(act)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "stage"), [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in ALL]
)
def test_a_signal_at_every_stage(name: str, stage: str, place: Path, tmp_path: Path) -> None:
    """The step is finished and a checkpoint saved, and the rest is the same bits."""
    out = tmp_path / "run"
    code = signalled(words(place, out), signal.Signals[name], stage)
    status = json.loads((out / "status.json").read_text())
    interrupted = name == "SIGINT" and stage == "preparation"  # Ctrl-C before there is anything to save
    expected = (130, "failed") if interrupted else (75, "stopped")
    assert (code, status["state"]) == expected
    assert status["exit_code"] == code
    saved = sorted(path.name for path in out.glob("checkpoints/*"))
    last = [] if stage == "preparation" else [f"step-{max(losses(out)):08d}"]
    assert saved[-1:] == last
    assert run(lambda: main(words(place, out))) == 0
    assert_same_weights(out, place / "whole", STEPS)
    assert losses(out) == losses(place / "whole")
    tally("signals", tried=1)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_what_a_launcher_passes_on_is_no_second_signal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers signal every process, and the launcher then does so again."""
    number = signal.Signals[name]

    def twice(later: float) -> Callable[[], None]:
        def act() -> None:
            clock = iter([10.0, 10.0 + later, 20.0])
            monkeypatch.setattr("draftsmith.trainers.loop.signals.time.monotonic", lambda: next(clock))
            with interrupt_on_signal(), stop_on_signal() as stop:
                signal.raise_signal(number)
                assert stop.name == name
                signal.raise_signal(number)

        return act

    assert run(twice(0.5)) == 0
    assert run(twice(1.5)) == -number


def test_outside_of_the_steps_a_signal_leaves_at_once() -> None:
    """Past whatever catches errors on the way."""
    before = {number: signal.getsignal(number) for number in signal.Signals}

    @interrupt_on_signal()
    def caught_by_everybody() -> None:
        with contextlib.suppress(Exception):
            signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(Stopped, match="SIGUSR1: stopped outside of the steps"):
        caught_by_everybody()
    assert not issubclass(Interrupted, Exception)
    assert {number: signal.getsignal(number) for number in signal.Signals} == before


def test_what_is_to_be_ignored_stays_so() -> None:
    """`nohup` has it ignored, so that the run outlives the terminal."""

    def act() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with interrupt_on_signal(), stop_on_signal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    assert run(act) == 0
