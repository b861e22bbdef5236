"""Memory of a run: what the C library keeps between steps, and what is said where it ends.

glibc returns blocks of some megabytes as soon as they are free, and the pages of the next block
fault in again: with the embedded target that was half the time of the loss over the vocabulary. On
a GPU torch's own cache serves this purpose. Read next: `setup.py`, which calls it; `step.py`, which
takes a step in smaller parts where memory ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from ...errors import EnvironmentFailure

# parameters of mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory(*, single: int = 1 << 30, total: int = (1 << 31) - 1) -> bool:
    """Free blocks of up to `single` bytes stay with this process, up to `total` bytes of them.

    Returns whether the C library supports it; without it a run is slower, with the same results.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, single)) and bool(mallopt(_M_TRIM_THRESHOLD, total))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or the host ran out: torch has no one class for it on a CPU."""
    return isinstance(error, MemoryError) or (isinstance(error, Exception) and should_reduce_batch_size(error))


def free_memory() -> None:
    """Give back what nothing refers to. Call it behind the handler of an error, which refers to a great deal."""
    clear_device_cache(garbage_collection=True)


def out_of_memory(where: str, error: BaseException) -> EnvironmentFailure:
    """The message of memory that ran out where nothing smaller can be tried."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return EnvironmentFailure(
        f"memory ran out {where} ({reason}). Checkpoints are whole: give the same command with a smaller "
        "--loop.micro_rows (the batch stays what it is) to go on from the newest; where that is 1, a smaller "
        "data.sequence_length, objective.chunk or model needs a new --out"
    )


@contextlib.contextmanager
def explain_out_of_memory(where: str) -> Iterator[None]:
    """Raise EnvironmentFailure in place of any error of memory that ran out inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(where, error) from error
        raise
