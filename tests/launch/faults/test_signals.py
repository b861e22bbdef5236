"""A signal at any moment ends a run where it can be gone on with, and says so."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from draftsmith.errors import Stopped
from draftsmith.eval.measure import probe
from draftsmith.launch.cli import main
from draftsmith.trainers.loop import checkpoint
from draftsmith.trainers.loop.interruptions import Interrupted, interrupt_on_signal, stop_on_signal
from draftsmith.trainers.loop.loop import Loop
from draftsmith.trainers.loop.snapshot import Snapshots
from draftsmith.trainers.loop.step import Steps
from draftsmith.trainers.teacher import frozen
from faults import ranks, toy
from faults.signalled import PLACES, Stage, one_of_two, signalled
from helpers.reliability_tally import tally
from helpers.runs.crashed_process import run
from helpers.runs.small_run import assert_same_weights, losses, write_recipe

STEPS = 8
FEW = ["--loop.steps", str(STEPS), "--checkpoint.every_steps", "3", "--loop.validate_every", "4"]
FEW += ["--probe.every_steps", "4"]
STAGES = {
    "preparation": Stage(frozen, "prepare_rows"),
    "warm-up": Stage(Steps, "update"),
    "forward": Stage(Steps, "backward", 5),
    "step": Stage(Steps, "update", 2),
    "validation": Stage(Loop, "validate"),
    "probe": Stage(probe, "tau"),
    "export": Stage(Loop, "export"),
    "save": Stage(Snapshots, "_fill"),
    "second epoch": Stage(Steps, "update", 6),
    "last step": Stage(Steps, "update", STEPS),
}
SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"]
ALL = [(name, stage) for name in SIGNALS for stage in STAGES]
FAST = [("SIGHUP", "step")]
OF_TWO = itertools.product(SIGNALS, (0, 1), PLACES)


def words(folder: Path, out: Path) -> list[str]:
    return ["train", str(folder / "small.yaml"), "--out", str(out), "--data.source", str(folder / "text.txt"), *FEW]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, and its run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("signals")
    write_recipe(folder)
    (folder / "text.txt").write_text(inspect.getsource(inspect))
    assert run(lambda: main(words(folder, folder / "whole"))) == 0
    return folder


def end_of(name: str, stage: str) -> tuple[int, str]:
    """Exit code and state of a run that gets a signal at a stage."""
    if stage == "last step":
        return 0, "finished"
    if name == "SIGINT" and stage == "preparation":
        return 130, "failed"  # Ctrl-C before there is anything to save
    return 75, "stopped"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "stage"), [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in ALL]
)
def test_a_signal_at_every_stage(name: str, stage: str, place: Path, tmp_path: Path) -> None:
    """The step is finished and a checkpoint saved, and the rest is the same bits."""
    out = tmp_path / "run"
    code = signalled(lambda: main(words(place, out)), signal.Signals[name], STAGES[stage])
    status = json.loads((out / "status.json").read_text())
    assert (code, status["state"]) == end_of(name, stage)
    assert status["exit_code"] == code
    saved = sorted(path.name for path in out.glob("checkpoints/*"))
    last = [] if stage == "preparation" else [f"step-{max(losses(out)):08d}"]
    assert saved[-1:] == last
    assert run(lambda: main(words(place, out))) == 0
    assert_same_weights(out, place / "whole", STEPS)
    assert losses(out) == losses(place / "whole")
    tally("signals", tried=1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of two processes that nothing disturbs."""
    out = tmp_path_factory.mktemp("two") / "whole"
    ranks.run(2, one_of_two, out, 0, None, 0)
    return out


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank", "where"), OF_TWO)
def test_a_signal_to_one_of_two_stops_both_behind_the_same_step(
    name: str, rank: int, where: str, two: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    team = ranks.start(2, one_of_two, out, rank, where, signal.Signals[name])
    for process in team:
        process.join()
    step = max(toy.losses(out))
    assert 0 < step < toy.STEPS
    for each, process in enumerate(team):
        told = ranks.error(out, each)
        assert process.exitcode == Stopped.exit_code, told
        assert f"{name if each == rank else 'a signal on another process'}: stopped after step {step} of" in told
    newest = checkpoint.newest(out / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{step:08d}"
    ranks.run(2, one_of_two, out, rank, None, 0)
    assert toy.state_files(out) == toy.state_files(two)
    assert toy.losses(out) == toy.losses(two)
    tally("signals", tried=1)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_what_a_launcher_passes_on_is_no_second_signal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers signal every process, and the launcher then does so again."""
    number = signal.Signals[name]

    def twice(later: float) -> Callable[[], None]:
        def act() -> None:
            clock = iter([10.0, 10.0 + later, 20.0])
            monkeypatch.setattr("draftsmith.trainers.loop.interruptions.time.monotonic", lambda: next(clock))
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
