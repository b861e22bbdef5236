"""Keep the C library from returning memory to the system between the tensors of a step.

glibc returns blocks of some megabytes as soon as they are free, and the pages of the next block
fault in again: with the embedded target that was half the time of the loss over the vocabulary. On
a GPU torch's own cache serves this purpose. Read next: `setup.py`, which
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

    Returns whether the C library supports it; without it a run is slower, with the same results.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, single)) and bool(mallopt(_M_TRIM_THRESHOLD, total))
