"""How a run ends from outside, so that it can be gone on with: by a signal, or by a process that does not answer.

Signals: inside the steps they only set a flag, which the loop reads between them; outside, where nothing is half done
that would be missed, they leave at once. A second signal of the same kind ends the process.

Processes: one that is stopped or killed is met by the others as an operation that does not end, or as a connection
that was closed, and the error names an address at most. So each counts up in a file of its own, and the counts name
it. They are compared over some seconds, so that clocks of several machines need not agree.
Read next: `loop.py`, which runs inside; `launch/train/run.py`; `setup.py`, where the bound of all waiting is set.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ...errors import EnvironmentFailure, Stopped

if TYPE_CHECKING:
    from accelerate import Accelerator

_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")  # not every system has all
_CAUGHT = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_SAME = 1.0  # seconds: what a scheduler sends to every process a launcher passes on once more
_BEAT, _SILENCE = 0.5, 5.0  # seconds
_outside: dict[signal.Signals, Any] = {}  # the handlers before the outermost of ours


class StopFlag:
    """True once a signal has asked the run to stop; `name` is the signal's."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None


class Interrupted(BaseException):
    """A signal that leaves at once, past everything that catches errors; the message is the user's."""


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopFlag]:
    """Let TERM, INT, HUP and USR1 set a flag inside the block."""
    flag = StopFlag()

    def note(name: str) -> None:
        flag.name = flag.name or name

    with _caught(_CAUGHT, note):
        yield flag


@contextlib.contextmanager
def interrupt_on_signal() -> Iterator[None]:
    """Let TERM, HUP and USR1 raise Interrupted inside the block; INT raises KeyboardInterrupt as ever.

    Raises:
        Stopped: outside the block, in its place.
    """

    def leave(name: str) -> None:
        raise Interrupted(f"{name}: stopped outside of the steps; the same command goes on with what is there")

    try:
        with _caught([each for each in _CAUGHT if each != signal.SIGINT], leave):
            yield
    except Interrupted as left:
        raise Stopped(str(left)) from None


@contextlib.contextmanager
def _caught(numbers: Sequence[signal.Signals], first: Callable[[str], None]) -> Iterator[None]:
    """Call `first` at the first signal of each kind; a second one does what it did before all this."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; a notebook thread goes without
        return
    before = {number: signal.getsignal(number) for number in numbers}
    taken = {number: was for number, was in before.items() if was is not None and not _is_ignored(number, was)}
    added = {number: was for number, was in taken.items() if number not in _outside}
    _outside.update(added)
    seen: dict[int, float] = {}

    def handle(number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number not in seen:
            seen[number] = now
            first(signal.Signals(number).name)
        elif now - seen[number] > _SAME:
            signal.signal(number, _outside[signal.Signals(number)])
            signal.raise_signal(number)

    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, was in taken.items():
            signal.signal(number, was)
        for number in added:
            del _outside[number]


def _is_ignored(number: signal.Signals, handler: Any) -> bool:
    """Whether somebody wants it to be: `nohup` has HUP ignored."""
    return handler is signal.SIG_IGN and number not in (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def name_the_silent(out: Path, accelerator: Accelerator, *, bound: float) -> Iterator[None]:
    """A context in which this process shows that it is alive, and an error says which other one is not.

    Args:
        out: the run's folder, which all processes share.
        bound: the seconds that a process waits for another, for the message.

    Raises:
        EnvironmentFailure: in place of the error of waiting for a process that is stopped, killed or late.
    """
    world = accelerator.num_processes
    if world == 1:
        yield
        return
    own = out / ".alive" / str(accelerator.process_index)
    ended = threading.Event()
    thread = threading.Thread(target=_count_up, args=(own, ended), daemon=True)
    thread.start()
    try:
        yield
    except RuntimeError as error:
        _explain(error, own.parent, world, bound)
        raise
    finally:
        ended.set()
        thread.join()
        own.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are in it
            own.parent.rmdir()


def silent(folder: Path, world: int) -> list[int]:
    """The processes that do not count up while this one looks for some seconds."""
    before = [_counted(folder / str(rank)) for rank in range(world)]
    time.sleep(_SILENCE)
    after = [_counted(folder / str(rank)) for rank in range(world)]
    return [rank for rank in range(world) if before[rank] == after[rank]]


def _explain(error: RuntimeError, folder: Path, world: int, bound: float) -> None:
    """Raise EnvironmentFailure where the error is one of waiting for another process."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    still = silent(folder, world)
    way_on = "With `--resume auto` the same command continues from the newest checkpoint"
    if 0 < len(still) < world:
        names = ", ".join(map(str, still))
        raise EnvironmentFailure(
            f"process {names} of {world} (counted from 0) does not answer: it was stopped or killed, or its "
            f"machine is gone ({reason}). {way_on}"
        ) from error
    if "timed out" in reason.lower() or "timeout" in reason.lower():
        raise EnvironmentFailure(
            f"a process waited {bound:g} seconds for another one, which is alive and busy ({reason}). "
            f"loop.stall_seconds sets that bound. {way_on}"
        ) from error


def _count_up(path: Path, ended: threading.Event) -> None:
    for number in count():
        # a disk that is full for a moment is no reason to end; the run's own writes say it
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)  # another process may have left, and removed it
            path.write_text(str(number), encoding="utf-8")
        if ended.wait(_BEAT):
            return


def _counted(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
