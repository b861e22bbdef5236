"""Keep the C library from giving memory back between the tensors of a step.

glibc hands blocks of some megabytes back to the system as soon as they are free, and every page of
the next one is then made anew: with the embedded target that was half the time of the loss over
the vocabulary. On a GPU torch's own cache does what is done here. Read next: `setup.py`, which
calls it.
"""

from __future__ import annotations

import ctypes
import sys

# parameters of mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory(*, single: int = 1 << 30, total: int = (1 << 31) - 1) -> bool:
    """Free blocks of up to `single` bytes stay with this process, up to `total` bytes of them.

    Returns whether the C library knows how; without it a run is slower and the same otherwise.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, single)) and bool(mallopt(_M_TRIM_THRESHOLD, total))
