"""A live line: the stage, how far it is, and the time left by the rate so far.

Read next: `measure/rounds.py` and `audit/audit.py`, which work that long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..bars import bar

if TYPE_CHECKING:
    from tqdm import tqdm


def live(stage: str, total: int, unit: str) -> tqdm[Any]:
    """A bar that is gone when its stage is done; call `update` with how much was done."""
    return bar(total=total, desc=stage, unit=unit, dynamic_ncols=True)
