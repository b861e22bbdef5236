"""What sizes in a drafter folder's config may be: whole numbers, and no more than a module was ever built of.

Read next: `weights.py`, which holds them to the weights.
"""

from __future__ import annotations

import math
from typing import Any

MOST_PARTS = 4_096
"""Of what is built one by one."""


def check_sizes(**sizes: Any) -> None:
    """Raise ValueError for a size that is no whole number above 0."""
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size < 2**40:
            raise ValueError(f"{name} is {size!r:.40}; expected a whole number from 1 on")


def check_parts(count: int, what: str) -> None:
    """Raise ValueError for more parts than anybody builds."""
    if count > MOST_PARTS:
        raise ValueError(f"{what} make {count:,} parts; expected at most {MOST_PARTS:,}")


def check_number(least: float, **numbers: Any) -> None:
    """Raise ValueError for what is no finite number from `least` on."""
    for name, number in numbers.items():
        if type(number) not in (int, float) or not math.isfinite(number) or number < least:
            raise ValueError(f"{name} is {number!r:.40}; expected a number from {least:g} on")
