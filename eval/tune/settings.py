"""What is tuned: methods, and the settings that each may have.

Read next: `profile.py`, which predicts every setting from a few; `race.py`, which measures the best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...decoding.proposal import Proposer
from ...drafters.grids import Grid
from .words import in_words


@dataclass(frozen=True)
class Contender:
    """A method to tune."""

    name: str
    """As it is asked for: a drafter's folder, or a method without one."""
    title: str
    """As tables show it."""
    grids: Sequence[Grid]
    """Empty: it has the one setting that it is loaded with."""
    own: bool
    """Whether what it is loaded with, without values, is tried too; for settings that stand in no grid."""
    load: Callable[[Mapping[str, str]], Proposer]
    """The proposer under recipe values, given as flags give them."""

    def of_chains(self) -> Contender:
        """The same with the chains of its grids alone; one without any keeps its settings."""
        grids = [grid for grid in self.grids if grid.chain]
        return replace(self, grids=grids, own=False) if grids else self

    def grids_at(self, temperature: float) -> list[Grid]:
        """Those whose settings decode differently at that temperature."""
        if temperature > 0:
            return list(self.grids)
        return [grid.greedy() for grid in self.grids if not grid.sampled]


@dataclass(frozen=True)
class Setting:
    """A method under some recipe values."""

    contender: Contender
    values: Mapping[str, str]

    @property
    def label(self) -> str:
        """`medusa, tree of 8 nodes`."""
        if not self.values:
            return f"{self.contender.title}, as the recipe has it" if self.contender.grids else self.contender.title
        return f"{self.contender.title}, {in_words(self.values)}"


@dataclass(frozen=True)
class Prediction:
    """What a setting promises, in terms of plain decoding.

    Attributes:
        tau: tokens per target call, bonus included.
        nodes: mean tokens of a verify call, the root included.
        proposing: time of everything in a step but the verify call / time of a one-token call.
        speedup: predicted tokens per second over plain decoding's.
        pays_from: how many times longer a one-token call would have to be for a speed-up of 1, were
            proposing to take as long as now: below 1 where it pays already; None where it never would.
    """

    setting: Setting
    tau: float
    nodes: float
    proposing: float
    speedup: float
    pays_from: float | None
