"""Candidate trees: parents, depths and who may look at whom.

A chain is a tree in which every node has one child; the engine and the rules know trees only.
Read next: `acceptance.py`, which walks them; `backbone.py`, which verifies them in one call.

Shapes: N nodes, the root included, D depth of the deepest node, C children.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """A tree given by the parent of each node; `parents[0]` is -1, parents precede children."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError("node 0 is the root: parents[0] must be -1")
        for node, parent in enumerate(self.parents[1:], 1):
            if not 0 <= parent < node:
                raise ValueError(f"parent of node {node} is {parent}: it must stand before it")

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root has 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return max(self.depths)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in the order in which they were drawn."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            found[parent].append(node)
        return tuple(map(tuple, found))

    @property
    def ancestors_NN(self) -> Tensor:
        """bool [N, N]: row n sees column m, an ancestor of n or n itself."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask[node] |= mask[parent]
        return mask

    def ancestors_on(self, device: torch.device) -> Tensor:
        """`ancestors_NN`, kept on `device`."""
        return _ancestors(self, device)

    def depths_on(self, device: torch.device) -> Tensor:
        """Depths of the nodes, int64 [N], kept on `device`."""
        return _depths(self, device)


@lru_cache(maxsize=256)
def _ancestors(tree: Tree, device: torch.device) -> Tensor:
    return tree.ancestors_NN.to(device)


@lru_cache(maxsize=256)
def _depths(tree: Tree, device: torch.device) -> Tensor:
    return torch.tensor(tree.depths, device=device)


@lru_cache(maxsize=64)
def chain(length: int) -> Tree:
    """The root and `length` nodes, one behind the other."""
    return Tree(tuple(range(-1, length)))
