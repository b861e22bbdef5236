"""Signals only set a flag, which the loop reads between steps.

A second signal of the same kind ends the process at once. Read next: `loop.py`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_CAUGHT = (signal.SIGTERM, signal.SIGINT)


class StopFlag:
    """True once a signal has asked the run to stop; `name` is the signal's."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None


@contextmanager
def stop_on_signal() -> Iterator[StopFlag]:
    """Catch TERM and INT inside the block; the previous handlers come back after the first one."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag  # only the main thread may set handlers; a notebook thread goes without
        return
    before = {number: signal.getsignal(number) for number in _CAUGHT}

    def handle(number: int, _frame: FrameType | None) -> None:
        flag.name = signal.Signals(number).name
        signal.signal(number, before[signal.Signals(number)])

    for number in _CAUGHT:
        signal.signal(number, handle)
    try:
        yield flag
    finally:
        for number in _CAUGHT:
            signal.signal(number, before[number])
