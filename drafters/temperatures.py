"""Whether a draft is drawn, and draft temperatures by depth: how much cooler or hotter than the target's own.

A rule accepts a drawn token with sum min(p, q) on average, and a draft that is surer than its target, or less sure,
loses some of it. Whoever draws at such a temperature declares the q that it draws from, so the output stays the
target's. At factor 0 that q is all on the likeliest token, and the rule is still that of drawn tokens.
`draftsmith tune` chooses the factors (`eval/tune/profile.py`). Read next: `../decoding/sampling.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..decoding.sampling import Warper

FACTORS = "drafter.temperature_factors"
"""The recipe value."""
Policy = Literal["sample", "argmax"]
"""Above temperature 0: draw drafted tokens, or take the likeliest ones."""


def samples(warper: Warper, policy: Policy) -> bool:
    """Whether drafted tokens are drawn; else they are the likeliest ones."""
    return not warper.greedy and policy == "sample"


def at_depth(warper: Warper, factors: Sequence[float], depth: int) -> Warper:
    """The transform of a drafted token: the temperature times the depth's factor, filters as they are.

    Args:
        factors: of depths 0, 1, ...; deeper tokens take the last. None at all: 1.
        depth: drafted tokens before this one.
    """
    if not factors:
        return warper
    # of factor 0 the transform is the greedy one: nothing is divided by it
    return replace(warper, temperature=warper.temperature * factors[min(depth, len(factors) - 1)])
