"""The settings of a family that `draftsmith tune` chooses from. No torch here.

Read next: `families.py`, whose records name them; `eval/tune/profile.py`, which measures a few of a
grid and predicts the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .temperatures import FACTORS


@dataclass(frozen=True)
class Grid:
    """Settings that differ in the size of a draft alone."""

    value: str
    """The recipe value that is the size: tokens of a chain, nodes of a tree."""
    sizes: tuple[int, ...]
    """Growing, three or more."""
    chain: bool = True
    """Whether a smaller draft is the beginning of a larger one."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Other recipe values that the settings have in common."""
    sampled: bool = False
    """Whether it differs from the family's first grid at temperatures above 0 alone."""
    suits: Callable[[Mapping[str, Any]], bool] = lambda _settings: True
    """Whether a trained drafter of these settings can draft so."""

    def values(self, size: int) -> dict[str, str]:
        """The recipe values of one setting, as flags give them."""
        return {**self.fixed, self.value: str(size)}

    @property
    def chosen(self) -> set[str]:
        """The recipe values that it chooses."""
        return {self.value, *self.fixed}

    def holds(self, own: Mapping[str, str]) -> bool:
        """Whether recipe values, as flags give them, are one of its settings."""
        return any(self.values(size).items() <= own.items() for size in self.sizes)

    def up_to(self, most: int) -> Grid:
        """The same without larger sizes; the smallest one stays."""
        return replace(self, sizes=tuple(size for size in self.sizes if size <= most) or self.sizes[:1])

    @property
    def drawn(self) -> bool:
        """Whether tokens are drawn from q, at draft temperatures that can be chosen."""
        return self.fixed.get(_POLICY) == "sample"

    def greedy(self) -> Grid:
        """The same without what says nothing at temperature 0."""
        silent = {_POLICY, FACTORS} if _POLICY in self.fixed else set()
        return replace(self, fixed={name: value for name, value in self.fixed.items() if name not in silent})


_POLICY = "drafter.policy"
NO_FACTORS = "[]"
"""The value of draft temperatures that are the target's own."""


def _by_nodes(depth: int) -> Grid:
    """EAGLE-2's tree of that depth."""
    fixed = {
        "drafter.eagle.tree": "dynamic",
        "drafter.tree": "default",
        "eval.draft_length": str(depth),
        FACTORS: NO_FACTORS,
    }
    return Grid("drafter.eagle.nodes", (6, 8, 12, 16, 24, 32, 61), chain=False, fixed=fixed)


_CHAIN = Grid("eval.draft_length", (1, 2, 3, 4, 5, 6, 8), fixed={_POLICY: "sample", FACTORS: NO_FACTORS})
_ARGMAX = replace(_CHAIN, fixed={**_CHAIN.fixed, _POLICY: "argmax"}, sampled=True)
BY_TEXT = (replace(_CHAIN, fixed={}),)
BY_MODEL = (_CHAIN, _ARGMAX)
BY_HEADS = (
    Grid("drafter.medusa.nodes", (2, 3, 4, 6, 8, 12, 20, 32), chain=False, fixed={"drafter.tree": "default"}),
    Grid("eval.draft_length", (1, 2, 3, 4, 5), fixed={"drafter.tree": "chain"}),
)
_EAGLE_CHAIN = {"drafter.eagle.tree": "chain", "drafter.tree": "default"}
BY_EAGLE = (*(replace(each, fixed={**each.fixed, **_EAGLE_CHAIN}) for each in BY_MODEL), _by_nodes(3), _by_nodes(5))


def _branches(settings: Mapping[str, Any]) -> bool:
    """Whether a block has two drafts or more, and a slot as many candidates as a node has children."""
    drafts = int(settings["size"]) - (settings["layout"] == "fill-in")
    return drafts > 1 and int(settings.get("candidates", _CHILDREN)) >= _CHILDREN


_CHILDREN = 4
_BLOCK_CHAIN = {"drafter.block.tree": "chain"}
_BLOCK_TREE = Grid(
    "drafter.block.nodes",
    (3, 4, 6, 8, 12, 16),
    chain=False,
    # as deep as the block, up to eight drafts
    fixed={
        "drafter.block.tree": "tree",
        "drafter.block.children": str(_CHILDREN),
        "eval.draft_length": "8",
        FACTORS: NO_FACTORS,
    },
    suits=_branches,
)
_UNCUT, _CUT = ({"drafter.confidence": least} for least in ("0.0", "0.4"))


def _cut(suits: Callable[[Mapping[str, Any]], bool]) -> Grid:
    """A block's chain that ends in front of the first slot in doubt."""
    return replace(_CHAIN, fixed={**_CHAIN.fixed, **_BLOCK_CHAIN, **_CUT}, suits=suits)


_BLOCK = tuple(
    replace(each, fixed={**each.fixed, **_UNCUT})
    for each in (*(replace(each, fixed={**each.fixed, **_BLOCK_CHAIN}) for each in BY_MODEL), _BLOCK_TREE)
)
BY_BLOCK = (*_BLOCK, _cut(lambda _settings: True))
BY_DSPARK = (*_BLOCK, _cut(lambda settings: bool(settings["confidence"])))
PROMPT_LOOKUP = (Grid("drafter.lookup.tokens", (1, 2, 3, 4, 6, 8, 10)),)
NGRAM = (Grid("drafter.ngram.tokens", (1, 2, 3, 4, 5, 6)),)
LLMA = (Grid("drafter.llma.tokens", (1, 2, 4, 6, 8, 12, 19)),)
SUFFIX = (Grid("drafter.suffix.tokens", (1, 2, 4, 6, 8, 12, 16)),)
