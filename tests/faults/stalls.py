"""Processes that stop or die in the middle of a run of several.

accelerate launch --config_file .../multi_cpu.yaml -m faults.stalls OUT PLACE SIGNAL
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from draftsmith.trainers.loop import interruptions
from faults import toy
from helpers.runs.small_run import write_recipe

BOUND = 3  # seconds that the recipe lets one process wait for another
PLACES = ("rows", "step", "save")
AT = 3
STOP, KILL = signal.SIGSTOP, signal.SIGKILL


def run(out: Path, rank: int, place: str, how: int, silence: float) -> None:
    """The body of a process: process `rank` is given a signal, while rows are read, behind a step or in a save."""
    interruptions._SILENCE = silence
    loop = toy.loop_in(out, stall_seconds=BOUND, every=1, micro_rows=2)
    (out / f"pid-{loop.accelerator.process_index}").write_text(str(os.getpid()))
    holder: Any = {"rows": loop.train_rows, "step": loop.steps, "save": loop.snapshots}[place]
    name = {"rows": "batch", "step": "update", "save": "save"}[place]
    real, calls = getattr(holder, name), [0]

    def call(*given: Any, **more: Any) -> Any:
        calls[0] += 1
        # of two processes each reads two micro-batches of a step, a step ahead
        if calls[0] == (AT + 2 if place == "rows" else AT) and loop.accelerator.process_index == rank:
            os.kill(os.getpid(), how)
        (out / f"last-{loop.accelerator.process_index}").write_text(str(time.monotonic()))
        return real(*given, **more)

    setattr(holder, name, call)
    try:
        toy.run(loop)
    finally:
        (out / f"end-{loop.accelerator.process_index}").write_text(str(time.monotonic()))


def prepare(out: Path, how: str, silence: float) -> None:
    """The body of a process of a real recipe, whose process 0 is busy with the rows, or is stopped at them."""
    from draftsmith.launch.train import run as launch
    from draftsmith.trainers.teacher import frozen

    interruptions._SILENCE = silence
    real = frozen.prepare

    def slow(*given: Any, **more: Any) -> Any:
        if os.environ["RANK"] == "0":
            if how == "stopped":
                os.kill(os.getpid(), STOP)
            time.sleep(BOUND + 600)
        return real(*given, **more)

    frozen.prepare = slow  # type: ignore[assignment]
    launch.train(str(write_recipe(out)), out=out / "run", loop__stall_seconds=BOUND)


def waited(out: Path, rank: int) -> float:
    """Seconds between the last thing that a process did and its end."""
    end, last = (float((out / f"{name}-{rank}").read_text()) for name in ("end", "last"))
    return end - last


if __name__ == "__main__":
    run(Path(sys.argv[1]), 1, sys.argv[2], int(sys.argv[3]), 5.0)
