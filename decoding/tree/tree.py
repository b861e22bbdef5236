"""Candidate trees: parents, depths, and which node attends to which.

A `Tree` has the same shape for every row and every step; `RowTrees` are built on the device, one
per row, within fixed bounds. A chain is a tree in which every node has one child; the engine and
the rules know trees only. Read next: `tree/build.py`, which makes trees of paths, confidences and
tries; `rules/acceptance.py`, which walks them; `backbone/backbone.py`, which verifies them in one call.

Shapes: B rows (1 where all rows share it), N nodes, the root included, C children of a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

_LEAST_BITS = 8
"""The narrowest mask that is kept has 2**8 slots."""


@dataclass(frozen=True)
class Tree:
    """A tree given by the parent of each node; `parents[0]` is -1, parents precede children."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError("node 0 is the root: parents[0] must be -1")
        for node, parent in enumerate(self.parents[1:], 1):
            if not 0 <= parent < node:
                raise ValueError(f"parent of node {node} is {parent}: it must come before it")

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
    def width(self) -> int:
        """Most children of a node."""
        return max(map(len, self.children))

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in the order in which they were drawn."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @property
    def ancestors_NN(self) -> Tensor:
        """bool [N, N]: row n sees column m, an ancestor of n or n itself."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask[node] |= mask[parent]
        return mask

    def on(self, device: torch.device) -> Nodes:
        """The tree as tensors with one row, kept on `device`."""
        return _nodes(self, device)


@dataclass(frozen=True)
class Nodes:
    """A tree as tensors; the leading dimension is 1 where all rows share the tree.

    Attributes:
        parents_BN: int64; -1 for the root and for nodes that a row does not have.
        depths_BN: int64; 0 for the root and for nodes that a row does not have.
        ancestors_BNN: bool; row n sees column m, an ancestor of n or n itself.
        children_BNC: int64; children in the order in which they were drawn, -1 after the last.
        is_chain: whether each node is known to be the parent of the next.
    """

    parents_BN: Tensor
    depths_BN: Tensor
    ancestors_BNN: Tensor
    children_BNC: Tensor
    is_chain: bool = False

    def mask(self, slots: int) -> Tensor:
        """bool [B, N, T]: a node sees its ancestors, itself and all that stands before the tree; T is `slots`.

        A part of a wider one, made once for many lengths of the text.
        """
        width = 1 << max(_LEAST_BITS, (slots - 1).bit_length())
        if width not in self._masks:
            before = width - self.ancestors_BNN.shape[1]
            self._masks[width] = nn.functional.pad(self.ancestors_BNN, (before, 0), value=True)
        return self._masks[width][..., width - slots :]

    @cached_property
    def _masks(self) -> dict[int, Tensor]:
        """The masks that were made, by their width."""
        return {}


class RowTrees:
    """A tree of its own for every row, within bounds that do not change from step to step."""

    is_chain = False

    def __init__(self, parents_BN: Tensor, *, depth: int, width: int, reach: int | None = None) -> None:
        """`parents_BN`: int64, before their children; -1 for the root and for absent nodes.

        No candidate may be deeper than `depth`, no node have more than `width` children. `reach`:
        depth of nodes that are computed without being candidates, where they go deeper.
        """
        self.parents_BN, self.depth, self.width = parents_BN, depth, width
        self._reach = max(depth, reach or 0)

    def __len__(self) -> int:
        return self.parents_BN.shape[1]

    def on(self, _device: torch.device) -> Nodes:
        """The trees as tensors, where their parents are."""
        return self._nodes

    @cached_property
    def _nodes(self) -> Nodes:
        ancestors_BNN = _ancestors(self.parents_BN, self._reach)
        depths_BN = ancestors_BNN.sum(2) - 1
        children_BNC = _children(self.parents_BN, self.width)
        return Nodes(self.parents_BN, depths_BN, ancestors_BNN, children_BNC)


AnyTree = Tree | RowTrees


@lru_cache(maxsize=64)
def chain(length: int) -> Tree:
    """The root and `length` nodes, one after the other."""
    return Tree(tuple(range(-1, length)))


@lru_cache(maxsize=256)
def _nodes(tree: Tree, device: torch.device) -> Nodes:
    wide = [[*each, *[-1] * (tree.width - len(each))] for each in tree.children]
    return Nodes(
        torch.tensor([tree.parents], device=device),
        torch.tensor([tree.depths], device=device),
        tree.ancestors_NN[None].to(device),
        torch.tensor([wide], dtype=torch.long, device=device).view(1, len(tree), tree.width),
        tree.is_chain,
    )


def _ancestors(parents_BN: Tensor, depth: int) -> Tensor:
    """bool [B, N, N]: row n sees its ancestors and itself; every squaring doubles how far up."""
    N = parents_BN.shape[1]
    node_N = torch.arange(N, device=parents_BN.device)
    up_BNN = (parents_BN[:, :, None] == node_N) | (node_N[:, None] == node_N)
    for _ in range((depth - 1).bit_length()):
        up_BNN = up_BNN.float() @ up_BNN.float() > 0
    return up_BNN


def _children(parents_BN: Tensor, width: int) -> Tensor:
    """Children by rank among their siblings. int64 [B, N, C]."""
    B, N = parents_BN.shape
    same_BNN = parents_BN[:, :, None] == parents_BN[:, None, :]
    rank_BN = same_BNN.tril(-1).sum(2)
    # roots and absent nodes have no parent: they go to a row that is cut off
    row_BN = torch.where(parents_BN < 0, N, parents_BN)
    children_BX = parents_BN.new_full((B, (N + 1) * width), -1)
    slot_BN = row_BN * width + rank_BN.clamp_max(width - 1)
    node_BN = torch.arange(N, device=parents_BN.device).expand(B, -1)
    return children_BX.scatter(1, slot_BN, node_BN).view(B, N + 1, width)[:, :N]


def tree_mask(nodes: Nodes, lengths_B: Tensor, slots: int, *, ragged: bool) -> Tensor | None:
    """bool [B, 1, N, T] (or [1, 1, N, T] where rows are alike): what a node attends to.

    That is its row's past, its ancestors and itself; T is `slots`, all that the forward sees.
    None for one node of one row, which sees every slot: without a mask `transformers` need not
    copy the key-value heads that are shared.
    """
    ancestors_BNN = nodes.ancestors_BNN
    N = ancestors_BNN.shape[1]
    if not ragged:
        if len(lengths_B) == 1 and N == 1:
            return None
        return nodes.mask(slots)[:, None]
    offset_BT = torch.arange(slots, device=lengths_B.device) - lengths_B[:, None]
    if nodes.is_chain:  # the same by fewer operations
        return (offset_BT[:, None] <= nodes.depths_BN[:, :, None])[:, None]
    inside_BT = (offset_BT >= 0) & (offset_BT < N)
    at_BNT = offset_BT.clamp(0, N - 1)[:, None].expand(-1, N, -1)
    seen_BNT = ancestors_BNN.expand(len(lengths_B), -1, -1).gather(2, at_BNT) & inside_BT[:, None]
    return (seen_BNT | (offset_BT < 0)[:, None])[:, None]
