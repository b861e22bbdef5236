"""A mix whose weights move: from forward KL alone to what the recipe asks for.

Where a draft from scratch and the target hardly meet, the total variation has hardly a gradient
(`divergences.total_variation`), so a mix that lives on it begins with a KL. Read next: `mix.py`;
`distill.py`, which trains on the mix of every step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import ObjectiveConfig
from .mix import TERMS, Mix

TV_SHARE = 0.3  # of the steps, for a total variation that nothing else holds up


@dataclass(frozen=True)
class Ramp:
    """`last` is the recipe's mix, reached after `share` of all steps."""

    last: Mix
    share: float

    @classmethod
    def of(cls, objective: ObjectiveConfig) -> Ramp:
        """The recipe's; where it names no share, a total variation alone begins with KL."""
        last = Mix.of(objective)
        alone = bool(last.tv) and not (last.kl or last.ce)
        own = TV_SHARE if alone else 0.0
        return cls(last, own if objective.from_kl_share is None else objective.from_kl_share)

    def at(self, step: int, steps: int) -> Mix:
        """The mix of a step, counted from 0, of a run of so many.

        Every term of the last mix has a weight from the first step on, so that all steps report
        the same terms.
        """
        moving = round(self.share * steps)
        if step + 1 >= moving:
            return self.last
        part = (step + 1) / moving
        weights = {name: part * getattr(self.last, name) for name in TERMS}
        weights["kl"] += 1 - part
        return replace(self.last, **weights)
