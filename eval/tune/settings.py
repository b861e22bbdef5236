"""What is tuned: methods, and the settings that each may have.

A drafter's setting is said in words: `chain of 3`, `tree of 16 nodes, 5 deep`. No torch here.

Read next: `profile.py`, which predicts every setting from a few; `race.py`, which measures the best.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...drafters.grids import NO_FACTORS, Grid
from ...drafters.temperatures import FACTORS

if TYPE_CHECKING:
    from ...decoding.proposal import Proposer


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
    cuts: Sequence[int] = ()
    """Sizes of a draft vocabulary that its best setting is tried with."""

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
class DraftSetting:
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

    setting: DraftSetting
    tau: float
    nodes: float
    proposing: float
    speedup: float
    pays_from: float | None


_SPACES = str.maketrans("._", "  ")
_LENGTH = "eval.draft_length"
_COPIED = ("drafter.lookup.tokens", "drafter.llma.tokens", "drafter.suffix.tokens")
_NODES = ("drafter.medusa.nodes", "drafter.eagle.nodes", "drafter.block.nodes")
# what the words for a size say already: whether it is a chain's or a tree's
_SHAPES = {
    "drafter.tree": ("default", "chain"),
    "drafter.eagle.tree": ("chain", "dynamic"),
    "drafter.block.tree": ("chain", "tree"),
}
CUT = "drafter.draft_vocabulary"
"""The recipe value of which `Contender.cuts` are sizes."""


def in_words(values: Mapping[str, str]) -> str:
    """Recipe values of a drafter, as flags give them; empty where there are none."""
    return ", ".join(words for _, words in phrases(values))


def phrases(values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The values that have to be named, each with the words for it; those of the size first."""
    is_tree = any(name in _NODES for name in values)
    ordered = sorted(values.items(), key=lambda item: (item[0] not in _NODES, item[0] != _LENGTH))
    for name, value in ordered:
        if words := _phrase(name, value, is_tree=is_tree):
            yield name, words


def _phrase(name: str, value: str, *, is_tree: bool) -> str:
    """Nothing for what goes without saying."""
    if name in _NODES:
        return f"tree of {value} nodes"
    if name == CUT:
        return f"drafts {int(value):,} tokens"
    if name == _LENGTH:
        return f"{value} deep" if is_tree else f"chain of {value}"
    if name in _COPIED:
        return f"copies at most {_tokens(value)}"
    if name == "drafter.ngram.tokens":
        return f"chain of {value}"
    if name == "drafter.policy":
        return "likeliest tokens" if value == "argmax" else ""
    if name == "drafter.block.children":
        return f"{value} children a node"
    if name == "drafter.confidence":
        return f"cut below confidence {value}" if float(value) else ""
    if name == FACTORS:
        return "" if value == NO_FACTORS else f"drawn at {_factors(value)} times the temperature"
    return "" if value in _SHAPES.get(name, ()) else f"{name.split('.', 1)[-1].translate(_SPACES)} {value}"


def _tokens(value: str) -> str:
    return "1 token" if value == "1" else f"{value} tokens"


def _factors(value: str) -> str:
    """Those of depths 1, 2, ...: `0.9 and 1.1`."""
    *first, last = [f"{each:g}" for each in json.loads(value)]
    return f"{', '.join(first)} and {last}" if first else last
