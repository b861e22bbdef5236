"""Which of a run's processes are alive: each of them counts up in a file of its own.

A process that is stopped or killed is met by the others as an operation that does not end, or as a
connection that was closed: the error names an address at most. The counts name the process. They are
compared over some seconds, so that clocks of several machines need not agree.
Read next: `loop.py`, which runs inside, as the preparation of data does; `setup.py`, where the bound of
all waiting is set.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from accelerate import Accelerator

from ...errors import EnvironmentFailure

_BEAT, _SILENCE = 0.5, 5.0  # seconds


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
