"""What sizes in a drafter folder's config may be: whole numbers, and no more than a module was ever built of.

Read next: `weights.py`, which holds them to the weights.
"""

from __future__ import annotations

from typing import Any

MOST_PARTS = 4_096
"""Of what is built one by one."""
MOST_NUMBER = 1e15
"""Of an angle or an epsilon: a larger one is no number that tensors compute with."""


def check_sizes(**sizes: Any) -> None:
    """Raise ValueError for a size that is no whole number above 0."""
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size < 2**40:
            raise ValueError(f"{name} is {size!r:.40}; expected a whole number from 1 on")


def check_parts(count: int, what: str) -> None:
    """Raise ValueError for more parts than anybody builds."""
    if count > MOST_PARTS:
        raise ValueError(f"{what} make {count:,} parts; expected at most {MOST_PARTS:,}")


def check_layers(layers: Any, *, ordered: bool = False) -> None:
    """Raise ValueError for what are no numbers of hidden states; `ordered`: different ones, low to high."""
    if not layers or not all(type(layer) is int for layer in layers):
        raise ValueError(f"layers are {layers!r:.60}; expected the numbers of hidden states")
    if ordered and list(layers) != sorted(set(layers)):
        raise ValueError(f"layers are {layers!r:.60}; expected the numbers of different hidden states, low to high")


def check_number(least: float, **numbers: Any) -> None:
    """Raise ValueError for what is no number from `least` to `MOST_NUMBER`."""
    for name, number in numbers.items():
        if type(number) not in (int, float) or not least <= number <= MOST_NUMBER:
            raise ValueError(f"{name} is {number!r:.40}; expected a number from {least:g} to {MOST_NUMBER:g}")
