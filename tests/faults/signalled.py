"""Signals that come at a chosen call of a chosen function: in a command, and on one process of two."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from faults import toy
from helpers.runs.crashed_process import run


class Stage(NamedTuple):
    """Where a signal comes: before which call of which function."""

    owner: Any
    name: str
    call: int = 1


# of a run of several processes: the part of the loop, and its call
PLACES = {
    "rows": ("train_rows", "batch", 9),
    "warm-up": ("steps", "update", 1),
    "forward": ("steps", "backward", 6),
    "update": ("steps", "update", 9),
    "save": ("snapshots", "save", 1),
    "validation": ("validation_rows", "batch", 1),
}


def send_at(stage: Stage, number: int) -> None:
    """Let this process be sent the signal at the stage."""
    real, calls = getattr(stage.owner, stage.name), [0]

    def call(*given: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == stage.call:
            os.kill(os.getpid(), number)
        return real(*given, **more)

    setattr(stage.owner, stage.name, call)


def signalled(act: Callable[[], Any], number: int, stage: Stage) -> int:
    """The exit code of a copy of this process that does `act` and gets a signal at the stage."""

    def with_signal() -> Any:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        send_at(stage, number)
        return act()

    return run(with_signal)


def one_of_two(out: Path, rank: int, place: str | None, number: int) -> None:
    """The body of a process of a small run, of which process `rank` gets a signal at one of `PLACES`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loop = toy.loop_in(out, every=5, micro_rows=2)
    if place is not None and loop.accelerator.process_index == rank:
        part, name, call = PLACES[place]
        send_at(Stage(getattr(loop, part), name, call), number)
    toy.run(loop)
