"""What a drafter hands to the verifier, and how its tokens came about.

The declared law decides which acceptance rule is lossless (`acceptance.rule_for`).
Read next: `tree.py`, `acceptance.py`.

Shapes: B rows, N nodes of the candidate tree, the root included, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from .random import Uniforms
from .sampling import Warper
from .tree import Tree


class Law(Enum):
    """How the tokens of a proposal were drawn."""

    POINT_MASS = "point mass"
    """Chosen without randomness, given what stands before them."""
    IID = "independent draws"
    """Every child of a node ~ q of that node, independently."""
    WITHOUT_REPLACEMENT = "draws without replacement"
    """Siblings ~ q one after another, never the same twice."""


@dataclass(frozen=True)
class Proposal:
    """A candidate tree per row.

    Attributes:
        tokens_BN: int64; node 0 is the root, the last emitted token, not yet in the KV cache.
        tree: parents of the nodes, the same for all rows; a parent stands before its children.
        law: how the tokens were drawn.
        q_BNV: fp32 over the full target vocabulary: row n is the law that the children of node n
            were really drawn from. None for POINT_MASS; rows of leaves are never read.
    """

    tokens_BN: Tensor
    tree: Tree
    law: Law
    q_BNV: Tensor | None = None


@dataclass(frozen=True)
class Committed:
    """What a step added to every row, as the drafter needs to know it.

    Attributes:
        tokens_BE: emitted tokens, accepted ones first, then the extra one; garbage behind count_B.
        count_B: int64, tokens emitted by each row in this step; 0 for rows that are done.
    """

    tokens_BE: Tensor
    count_B: Tensor


class Proposer(Protocol):
    """What the engine needs of a drafter."""

    draft_length: int
    """Depth of the candidate tree; draft calls per step for chains."""

    def reset(self, prompts: Sequence[Sequence[int]], room: int) -> None:
        """Start new rows: `prompts` without the first emitted token, `room` tokens may follow."""

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Draft behind `last_B`, the last emitted token of every row."""

    def observe(self, committed: Committed) -> None:
        """Roll back what was rejected; the rows go on behind what was committed."""
