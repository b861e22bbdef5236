"""Two folders that change places at once, so that a name is never without its folder.

Linux can (renameat2), on most of its file systems. Read next: `folder.py`, which does it in two
renames elsewhere.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def swap(one: Path, other: Path) -> bool:
    """Exchange what is at two paths; False, and nothing changed, where that cannot be."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    return rename is not None and bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)
