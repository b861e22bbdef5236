"""A live line on a terminal: the stage, how far it is, and the time left by the rate so far; nothing elsewhere.

Read next: `measure/rounds.py` and `audit/audit.py`, which work that long.
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def live(stage: str, total: int, unit: str) -> tqdm[Any]:
    """A bar that is gone when its stage is done; call `update` with how much was done."""
    return tqdm(total=total, desc=stage, unit=unit, leave=False, disable=not sys.stderr.isatty(), dynamic_ncols=True)
