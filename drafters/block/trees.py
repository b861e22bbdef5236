"""Trees of a block's likeliest tokens, made of one pass: the next candidates stand where the likeliest may miss.

Whatever is in the tree, a pass has been made once: a node costs a place in the target's call and nothing here.

- `leaves` (DFlash): the slots do not see each other, so what a slot says fits behind the likeliest tokens in front of
  it, and seldom behind others. So only the chain of likeliest tokens branches: each of its tokens has the next
  candidates of its depth beside it, which end there.
- `grown` (DSpark, DFlash 2): head or selector says how well a token fits behind its parent, so each node's children
  are ranked behind that node, and the tree grows where its paths are likely, as EAGLE-2's does.

Candidates are the likeliest ones, a point mass at every temperature, and nothing of what is drawn shapes the tree.
Read next: `decoding/tree/build.py`, which grows trees.

Shapes: B rows, K depths, k nodes that are expanded at once, C children of a node, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...decoding.proposal import DraftSampling, Proposal
from ...decoding.tree.build import dynamic_tree, most_nodes
from ...errors import RequestError

# (depth from 0, tokens [B, k] in front) -> logits [B, k, V]
Behind = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class TreeShape:
    """How large a tree may be."""

    nodes: int
    """The root included."""
    children: int
    """Of a node at most, and nodes of a depth that have children."""

    def check(self, depth: int) -> None:
        """Raise RequestError where a block of `depth` drafts holds no such tree."""
        most = most_nodes(depth, self.children)
        if not 2 <= self.nodes <= most:
            raise RequestError(
                f"drafter.block.nodes is {self.nodes}, and a tree of depth {depth} with {self.children} children of a "
                f"node (drafter.block.children) has 2 to {most} nodes, the root included; lower the one or raise the "
                "other"
            )

    def of_leaves(self, depth: int) -> TreeShape:
        """The same with no more nodes than a chain with side leaves has: others would be verified for nothing."""
        return replace(self, nodes=min(self.nodes, 1 + depth * self.children))


def grown(last_B: Tensor, behind: Behind, depth: int, shape: TreeShape) -> Proposal:
    """A tree whose every node is ranked behind its own parent."""
    return _tree(last_B, behind, depth, shape, only_first=False)


def leaves(last_B: Tensor, behind: Behind, depth: int, shape: TreeShape) -> Proposal:
    """The likeliest chain, and beside each of its tokens the next candidates, which end there."""
    return _tree(last_B, behind, depth, shape, only_first=True)


def _tree(last_B: Tensor, behind: Behind, depth: int, shape: TreeShape, *, only_first: bool) -> Proposal:
    def likeliest(level: int, tokens_Bk: Tensor) -> tuple[Tensor, Tensor]:
        top = behind(level, tokens_Bk).log_softmax(-1).topk(shape.children)
        return top.values, top.indices

    def expand(tokens_Bk: Tensor, _parents_Bk: Tensor, level: int) -> tuple[Tensor, Tensor]:
        logp_BkC, children_BkC = likeliest(level, tokens_Bk)
        if only_first:  # the frontier's first node is the likeliest path; the others' children come last
            logp_BkC = torch.cat((logp_BkC[:, :1], torch.full_like(logp_BkC[:, 1:], -torch.inf)), 1)
        return logp_BkC, children_BkC

    logp_B1C, first_B1C = likeliest(0, last_B[:, None])
    tokens_BN, tree = dynamic_tree(
        last_B, (logp_B1C[:, 0], first_B1C[:, 0]), expand, depth=depth, top_k=shape.children, nodes=shape.nodes
    )
    return Proposal(tokens_BN, tree, DraftSampling.POINT_MASS)
