"""Candidate trees from index paths, from confidence and from tries.

All but tries, which the host looks up, are built on the device with fixed shapes and without a
host synchronisation. Each builder states how its tokens are drawn (`proposal.DraftSampling`).

The children of a node are drawn independently, or one after another without replacement, and judged by
`acceptance.accept_tree` under the distribution declared with it.

Read next: `tree.py`, what a tree is; `tree/search.py`, which paths are worth their nodes;
`tree/merge.py`, the trees of several drafts.

Shapes: B rows, C children, V vocabulary, N nodes (root included), D depths, R ranks (candidates per depth), k nodes of
the frontier that a draft expands at once, K children of each, G nodes generated before the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..sampling import draw
from .tree import RowTrees, Tree

# (tokens [B, k], slot of each parent in the frontier before [B, k], level)
#   -> (log-probabilities [B, k, K], tokens [B, k, K])
Expand = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Choices:
    """A static tree that says which candidate of its depth each node takes.

    Attributes:
        tree: the tree; its nodes are ordered by (depth, path).
        ranks: rank of each node among the candidates of its depth; 0 for the root.
    """

    tree: Tree
    ranks: tuple[int, ...]


def tree_of_paths(paths: Sequence[Sequence[int]]) -> Choices:
    """The tree of index paths, Medusa's "choices" (arXiv 2401.10774, section 2.1.2).

    Args:
        paths: rank of the candidate at every depth, for every node but the root, in any order.

    Raises:
        ValueError: a path is empty, negative or there twice, or a prefix of it is not in the list.
    """
    ordered = sorted(map(tuple, paths), key=lambda path: (len(path), path))
    node_of: dict[tuple[int, ...], int] = {(): 0}
    for node, path in enumerate(ordered, 1):
        if not path or min(path) < 0:
            raise ValueError(f"path {path}: expected ranks from 0 on (the root is always there)")
        if path in node_of:
            raise ValueError(f"path {path} is there twice")
        if path[:-1] not in node_of:
            raise ValueError(f"path {path} needs its prefix {path[:-1]}, which is not in the list")
        node_of[path] = node
    parents = (-1, *(node_of[path[:-1]] for path in ordered))
    return Choices(Tree(parents), (0, *(path[-1] for path in ordered)))


def fill_choices(choices: Choices, root_B: Tensor, topk_BDR: Tensor) -> Tensor:
    """Tokens of a static tree: every node takes the candidate of its depth and rank.

    `POINT_MASS` if `topk_BDR` holds the heads' likeliest tokens.

    Args:
        root_B: int64, the last emitted token.
        topk_BDR: int64 [B, D, R], candidates of every depth, best first; index 0 is depth 1.

    Returns:
        int64 [B, N].

    Raises:
        ValueError: the tree is deeper than D or takes a rank that is not among R.
    """
    _, D, R = topk_BDR.shape
    if choices.tree.depth > D or max(choices.ranks) >= R:
        raise ValueError(
            f"the tree has depth {choices.tree.depth} and ranks up to {max(choices.ranks)}; "
            f"there are candidates for {D} depths with {R} ranks"
        )
    depth_N, rank_N = _picks(choices, topk_BDR.device)
    return torch.cat([root_B[:, None], topk_BDR[:, depth_N, rank_N]], 1)


@lru_cache(maxsize=256)
def _picks(choices: Choices, device: torch.device) -> tuple[Tensor, Tensor]:
    """Depth and rank of all nodes but the root, to index `topk_BDR`; cached, as copying them would wait."""
    depths = [depth - 1 for depth in choices.tree.depths[1:]]
    pick_2N = torch.tensor([depths, choices.ranks[1:]], dtype=torch.long, device=device)
    return pick_2N[0], pick_2N[1]


def dynamic_tree(
    root_B: Tensor, first: tuple[Tensor, Tensor], expand: Expand, *, depth: int, top_k: int, nodes: int
) -> tuple[Tensor, RowTrees]:
    """Grow where the draft is confident, then keep the best nodes of all (EAGLE-2, 2406.16858).

    The confidence V of a node is the log-probability of its path. Every level expands the `top_k`
    best nodes of the level before; in the end the `nodes - 1` best of *all* nodes stay, equals by
    depth, shallow first, then in the order of generation. V never grows on the way down, so a node
    stays only if its parent does, with ties too.

    `POINT_MASS`, which holds only for deterministic candidates: `first` and `expand` must give the
    draft's likeliest tokens. Never rank sampled ones: whether a sampled token is kept may not
    depend on its own value, or the output is biased.

    Args:
        root_B: int64, the last emitted token.
        first: log-probabilities and tokens of the root's children, each [B, top_k].
        expand: runs the draft on a frontier. Takes its tokens [B, top_k], the slot of each parent
            in the frontier before [B, top_k] (0, the root, at level 1) and the level, which is the
            depth of the frontier; gives log-probabilities (0 or below) and tokens of the children,
            each [B, top_k, K], distinct below one parent. Called `depth - 1` times.
        depth: levels of candidates, 1 for the root's children alone.
        top_k: nodes that are expanded at once.
        nodes: size of the tree, the root included.

    Returns:
        int64 tokens [B, nodes] and the trees; the last nodes are absent where fewer were generated.

    Raises:
        ValueError: `depth` below 1, `nodes` below 2, or `first` not of `top_k` candidates.
    """
    if depth < 1 or nodes < 2 or first[0].shape[1] != top_k:
        raise ValueError(
            f"depth {depth}, {nodes} nodes, {first[0].shape[1]} first candidates; expected at "
            f"least 1, at least 2, and top_k = {top_k}"
        )
    grown = _Growth(*first)
    for level in range(1, depth):
        grown.add(*expand(*grown.frontier(top_k), level))
    tokens_BN, parents_BN = grown.best(nodes - 1)
    return (
        torch.cat([root_B[:, None], tokens_BN], 1),
        RowTrees(pad(parents_BN, (1, 0), value=-1), depth=depth, width=grown.width),
    )


def most_nodes(depth: int, top_k: int) -> int:
    """Nodes that `dynamic_tree` generates with as many children as `top_k`, the root included."""
    return 1 + top_k + (depth - 1) * top_k**2


class _Growth:
    """All nodes generated so far, level by level, by their number in the order of generation."""

    def __init__(self, logp_Bk: Tensor, tokens_Bk: Tensor) -> None:
        self.V_BG, self.tokens_BG = logp_Bk.float(), tokens_Bk
        self.parents_BG = torch.full_like(tokens_Bk, -1)  # the root has no number
        self.width = logp_Bk.shape[1]
        self.start = 0  # where the last level begins
        self.fan = self.width  # children of each node of the frontier before
        self.chosen_Bk = tokens_Bk

    def frontier(self, top_k: int) -> tuple[Tensor, Tensor]:
        """Tokens of the best nodes of the last level, and their parents' slots; marks them."""
        # stable: equals in the order of generation, which `topk` does not promise
        order_BX = self.V_BG[:, self.start :].argsort(dim=1, descending=True, stable=True)
        self.chosen_Bk = self.start + order_BX[:, :top_k]
        return self.tokens_BG.gather(1, self.chosen_Bk), order_BX[:, :top_k] // self.fan

    def add(self, logp_BkK: Tensor, tokens_BkK: Tensor) -> None:
        """Children of the frontier; they are the new last level."""
        self.start, self.fan = self.V_BG.shape[1], logp_BkK.shape[2]
        self.width = max(self.width, self.fan)
        V_Bk = self.V_BG.gather(1, self.chosen_Bk)
        # a probability rounded to more than 1 would lift a child above its parent
        V_BkK = V_Bk[:, :, None] + logp_BkK.float().clamp_max(0)
        parents_BkK = self.chosen_Bk[:, :, None].expand_as(tokens_BkK)
        self.V_BG = torch.cat([self.V_BG, V_BkK.flatten(1)], 1)
        self.tokens_BG = torch.cat([self.tokens_BG, tokens_BkK.flatten(1)], 1)
        self.parents_BG = torch.cat([self.parents_BG, parents_BkK.flatten(1)], 1)

    def best(self, count: int) -> tuple[Tensor, Tensor]:
        """Tokens and parents of the `count` best nodes, the root being 0. int64 [B, count] each."""
        # generation goes level by level: stable means shallow first, then the lower number
        order_BG = self.V_BG.argsort(dim=1, descending=True, stable=True)
        kept_BX = order_BG[:, :count].sort(dim=1).values
        node_BX = torch.arange(1, kept_BX.shape[1] + 1, device=kept_BX.device).expand_as(kept_BX)
        # a node that stayed without its parent, which takes a NaN, is absent and never accepted
        node_of_BG = torch.full_like(self.parents_BG, -1).scatter(1, kept_BX, node_BX)
        # one more column at the front for the root, which has number -1
        parents_BX = pad(node_of_BG, (1, 0)).gather(1, self.parents_BG.gather(1, kept_BX) + 1)
        missing = (0, count - kept_BX.shape[1])
        return pad(self.tokens_BG.gather(1, kept_BX), missing), pad(parents_BX, missing, value=-1)


def tree_of_tries(
    root_B: Tensor, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], nodes: int, depth: int
) -> tuple[Tensor, RowTrees]:
    """One trie per row, found on the host, as trees of one size (REST, arXiv 2311.08252).

    `POINT_MASS`: what a datastore holds does not depend on a random number of this call (`proposal.Remembering`).

    Args:
        root_B: int64, the last emitted token; the trees are built on its device.
        tokens: tokens of each row's trie, at most `nodes - 1`; none for a row without a match.
        parents: for each of them its parent's index in the same list, -1 below the root; parents
            come before children.
        nodes: size of the trees, the root included.
        depth: bound on their depth.

    Returns:
        int64 tokens [B, nodes] and the trees; a row's last nodes are absent.

    Raises:
        ValueError: not a trie per row, one too large or too deep, or a parent after its child.
    """
    if nodes < 2 or not len(tokens) == len(parents) == len(root_B):
        raise ValueError(
            f"{len(tokens)} lists of tokens and {len(parents)} of parents, trees of {nodes} nodes; "
            f"expected one of each for all {len(root_B)} rows, and at least 2 nodes"
        )
    for row, (own, above) in enumerate(zip(tokens, parents, strict=True)):
        if len(own) != len(above) or len(own) >= nodes:
            raise ValueError(
                f"row {row} has {len(own)} tokens and {len(above)} parents; expected as many, at most {nodes - 1}"
            )
        own_depth = Tree((-1, *(parent + 1 for parent in above))).depth
        if own_depth > depth:
            raise ValueError(f"the trie of row {row} has depth {own_depth}, the bound is {depth}")
    missing = [nodes - 1 - len(own) for own in tokens]
    tokens_BX = [[*own, *[0] * more] for own, more in zip(tokens, missing)]
    parents_BN = [[-1, *(parent + 1 for parent in above), *[-1] * more] for above, more in zip(parents, missing)]
    return (
        torch.cat([root_B[:, None], torch.tensor(tokens_BX, device=root_B.device)], 1),
        RowTrees(torch.tensor(parents_BN, device=root_B.device), depth=depth, width=nodes - 1),
    )


def draw_siblings(probs_BV: Tensor, uniform_BC: Tensor, *, replace: bool) -> tuple[Tensor, Tensor]:
    """Children of one node per row, in the order in which they were drawn.

    Without replacement a row may have fewer than C tokens of positive probability: what is missing
    is said to be absent, never drawn with probability zero.

    Args:
        probs_BV: q, fp32, warped; the distribution to be declared for the node.
        uniform_BC: fresh numbers in [0, 1), one per child.
        replace: whether siblings may be the same token twice.

    Returns:
        tokens int64 [B, C], and whether each is there, bool [B, C].
    """
    tokens, present = [], []
    for child in range(uniform_BC.shape[1]):
        present.append(probs_BV.sum(-1) > 0)
        tokens.append(draw(probs_BV, uniform_BC[:, child]))
        if not replace:
            probs_BV = probs_BV.scatter(1, tokens[-1][:, None], 0.0)
    return torch.stack(tokens, 1), torch.stack(present, 1)
