"""Signals end a run where it can be gone on with.

Inside the steps they only set a flag, which the loop reads between them; outside, where nothing is
half done that would be missed, they leave at once. A second signal of the same kind ends the process.
Read next: `loop.py`; `launch/train/run.py`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ...errors import Stopped

_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")  # not every system has all
_CAUGHT = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_SAME = 1.0  # seconds: what a scheduler sends to every process a launcher passes on once more
_outside: dict[signal.Signals, Any] = {}  # the handlers before the outermost of ours


class StopFlag:
    """True once a signal has asked the run to stop; `name` is the signal's."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None


class Interrupted(BaseException):
    """A signal that leaves at once, past everything that catches errors; the message is the user's."""


@contextmanager
def stop_on_signal() -> Iterator[StopFlag]:
    """Let TERM, INT, HUP and USR1 set a flag inside the block."""
    flag = StopFlag()

    def note(name: str) -> None:
        flag.name = flag.name or name

    with _caught(_CAUGHT, note):
        yield flag


@contextmanager
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


@contextmanager
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
