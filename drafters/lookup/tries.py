"""Trees and chains found on the host, row by row, as a proposal: what REST, suffix decoding and functions draft.

A datastore, as drafters see it, is texts that are searched on the host for the end of a context.

Read next: `../extras/rest.py`, `function.py`; `decoding/tree/build.py`.

Shapes: B rows, N nodes, the root included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...decoding.proposal import DraftSampling, Proposal
from ...decoding.tree.build import tree_of_tries
from ...decoding.tree.tree import chain
from ...errors import RequestError

Trie = tuple[Sequence[int], Sequence[int]]
"""Tokens and parents of one row's nodes, the root left out; parent -1 is the root."""


def check_ids(tokens: Sequence[int], vocabulary: int, source: str) -> None:
    """Raise RequestError where tokens from `source` are not all below `vocabulary`."""
    highest = max(tokens, default=-1)
    if highest >= vocabulary:
        raise RequestError(
            f"{source} has the token id {highest}; expected 0 to {vocabulary - 1}, the target's vocabulary: give "
            "texts of the target's own tokenizer"
        )


def propose_tries(last_B: Tensor, tries: Sequence[Trie], *, nodes: int, depth: int) -> Proposal:
    """A point mass on every row's own tree, as wide as the largest of them.

    `nodes`, `depth`: bounds of any tree. A step always takes `nodes` random numbers, so that a row does
    not depend on the others' trees.
    """
    needed = 1 + max(len(tokens) for tokens, _ in tries)
    if needed == 1:
        return Proposal(last_B[:, None], chain(0), DraftSampling.POINT_MASS, coins=nodes)
    tokens, parents = [each[0] for each in tries], [each[1] for each in tries]
    # deeper than it has nodes no tree is, nor has the KV cache slots for a longer path
    tokens_BN, tree = tree_of_tries(last_B, tokens, parents, needed, min(depth, needed - 1))
    return Proposal(tokens_BN, tree, DraftSampling.POINT_MASS, coins=nodes)


def propose_chains(last_B: Tensor, chains: Sequence[Sequence[int]], *, coins: int) -> Proposal:
    """A point mass on every row's own chain, as long as the longest of them; `coins` as of `propose_tries`."""
    length = max(map(len, chains))
    padded = [[*tokens, *[0] * (length - len(tokens))] for tokens in chains]  # absent nodes: any valid id will do
    drafted_BK = torch.tensor(padded, dtype=torch.long, device=last_B.device).view(len(chains), length)
    count_B = torch.tensor([len(tokens) for tokens in chains], device=last_B.device)
    present_BN = torch.arange(length + 1, device=last_B.device) <= count_B[:, None]
    tokens_BN = torch.cat([last_B[:, None], drafted_BK], 1)
    return Proposal(tokens_BN, chain(length), DraftSampling.POINT_MASS, present_BN=present_BN, coins=coins)


class Store(Protocol):
    """The part of a datastore that drafters use."""

    @property
    def salt(self) -> int:
        """As of `decoding.proposal.Remembering`, of its texts."""

    def longest_end(self, context: Sequence[int], *, longest: int, shortest: int) -> int:
        """Tokens of the longest end of the context that occurs with a token behind it; 0 if none does."""

    def continuations(
        self, context: Sequence[int], *, longest: int, shortest: int, length: int, limit: int
    ) -> NDArray[np.int64]:
        """What follows the longest suffix of the context that occurs, [M, length], -1 padded."""

    @staticmethod
    def trie(continuations: NDArray[np.int64], nodes: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the most frequent prefixes."""
