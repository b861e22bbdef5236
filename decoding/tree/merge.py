"""Trees of several drafts as one: equal prefixes are expanded once, every draft keeps its trials.

Built on the device with fixed shapes and without a host synchronisation, but for a `compact` that
makes the shapes smaller. Read next: `acceptance.accept_several`, which walks them.

Shapes: B rows, N nodes (root included), N_m those of draft m, T trials (nodes of all drafts, roots
not counted), C trials of a node, V vocabulary, X nodes that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..proposal import Trials
from .tree import RowTrees


@dataclass(frozen=True)
class Merged:
    """Trees of several drafts as one.

    Attributes:
        tokens_BN: int64; node 0 is the root, draft 0's nodes follow, then draft 1's, and so on.
        tree: nodes with the same path of tokens are one, the first of them; the others are absent.
        present_BN: bool, False for absent nodes.
        trials: one for every node of every draft, for `DraftSampling.SEVERAL`; None where no q was given.
    """

    tokens_BN: Tensor
    tree: RowTrees
    present_BN: Tensor
    trials: Trials | None


def merge(
    root_B: Tensor,
    tokens: Sequence[Tensor],
    parents: Sequence[Tensor],
    q: Sequence[Tensor] | None,
    *,
    depth: int,
    width: int,
    tries: int | None = None,
) -> Merged:
    """One tree of the trees of several drafts; shared prefixes are expanded once (SpecInfer).

    Miao et al. 2023, arXiv 2305.09781, section 3 (merging) and 4.3 (the trials). Equal siblings
    within a draft are merged too and stay separate trials. The tree has N = 1 + sum(N_m - 1)
    nodes, however many were merged. With `q` its sampling is `DraftSampling.SEVERAL`, else `POINT_MASS`.

    Args:
        root_B: int64, the last emitted token, root of every draft's tree.
        tokens: int64 [B, N_m] per draft; node 0 is the root.
        parents: int64 per draft, [B, N_m] or [N_m] for all rows; parents come before children,
            -1 for the root and absent nodes.
        q: fp32 [B, N_m, V] per draft, the distributions from which it drew each node's children,
            independently; None for point masses. Rows of nodes without children are never used.
        depth: bound on the depth of every draft's tree.
        width: bound on the distinct children of a node after merging.
        tries: bound C on the trials of a node; as many as there are trials by default.

    Raises:
        ValueError: not the same number of drafts in `tokens`, `parents` and `q`, or none.
    """
    counts = {len(tokens), len(parents), len(parents if q is None else q)}
    if len(counts) != 1 or not tokens:
        raise ValueError(f"found {sorted(counts)} drafts; expected the same number, at least 1")
    tokens_BN = torch.cat([root_B[:, None], *(each[:, 1:] for each in tokens)], 1)
    own_BN = _side_by_side(parents, tokens)
    first_BN = _first_alike(tokens_BN, own_BN, depth)
    merged_BN = torch.where(own_BN < 0, -1, first_BN.gather(1, own_BN.clamp_min(0)))
    node_N = torch.arange(tokens_BN.shape[1], device=tokens_BN.device)
    present_BN = (first_BN == node_N) & ((own_BN >= 0) | (node_N == 0))
    tree = RowTrees(torch.where(present_BN, merged_BN, -1), depth=depth, width=width)
    if q is None:
        return Merged(tokens_BN, tree, present_BN, None)
    sizes = [each.shape[1] - 1 for each in tokens]
    child_BNC, q_index_BNC = _trials(first_BN, merged_BN, own_BN, sizes)
    trials = Trials(torch.cat(list(q), 1), child_BNC[..., :tries], q_index_BNC[..., :tries])
    return Merged(tokens_BN, tree, present_BN, trials)


def compact(merged: Merged, *, static: bool) -> Merged:
    """The same trees, absent nodes after all others; as few of them as the fullest row has.

    Absent nodes cost the target as much as candidates. A node's number says which random number
    decides on it, so every row is numbered anew, whatever its neighbours are.

    Args:
        static: keep all N nodes; else the host reads how many the fullest row has.
    """
    present_BN = merged.present_BN
    count = present_BN.shape[1] if static else int(present_BN.sum(1).max())
    # stable: parents keep standing before their children
    old_BX = (~present_BN).to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
    new_BN = present_BN.long().cumsum(1) - 1
    above_BX = merged.tree.parents_BN.gather(1, old_BX)
    tree = RowTrees(_renumbered(above_BX, new_BN), depth=merged.tree.depth, width=merged.tree.width)
    tokens_BX, present_BX = merged.tokens_BN.gather(1, old_BX), present_BN.gather(1, old_BX)
    trials = merged.trials
    if trials is not None:
        child_BXC = trials.child_BNC.gather(1, _widened(old_BX, trials.child_BNC))
        q_index_BXC = trials.q_index_BNC.gather(1, _widened(old_BX, trials.q_index_BNC))
        child_BXC = _renumbered(child_BXC.flatten(1), new_BN).view_as(child_BXC)
        trials = Trials(trials.q_BXV, child_BXC, q_index_BXC)
    return Merged(tokens_BX, tree, present_BX, trials)


def _renumbered(node_BX: Tensor, new_BN: Tensor) -> Tensor:
    """Nodes by their new numbers; -1 stays."""
    return torch.where(node_BX < 0, -1, new_BN.gather(1, node_BX.clamp_min(0)))


def _widened(at_BX: Tensor, like_BNC: Tensor) -> Tensor:
    return at_BX[..., None].expand(-1, -1, like_BNC.shape[2])


def _side_by_side(parents: Sequence[Tensor], tokens: Sequence[Tensor]) -> Tensor:
    """Parents of all drafts' nodes below one root, numbered consecutively. int64 [B, N]."""
    columns, before = [torch.full_like(tokens[0][:, :1], -1)], 0
    for own, tokens_BN in zip(parents, tokens, strict=True):
        own_BX = own.expand_as(tokens_BN)[:, 1:]
        # the root and "absent" mean the same for every draft
        columns.append(torch.where(own_BX > 0, own_BX + before, own_BX))
        before += own_BX.shape[1]
    return torch.cat(columns, 1)


def _first_alike(tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> Tensor:
    """The first node with the same path of tokens, for every node. int64 [B, N].

    Two nodes are alike if their tokens and the firsts of their parents are: each round settles
    one more depth. A first node comes before all that are like it, and so does its parent.
    """
    first_BN = torch.arange(tokens_BN.shape[1], device=tokens_BN.device).expand_as(tokens_BN)
    # absent nodes and the root are like no other node
    itself_NN = torch.eye(tokens_BN.shape[1], dtype=torch.bool, device=tokens_BN.device)
    there_BN = parents_BN >= 0
    token_BNN = (tokens_BN[:, :, None] == tokens_BN[:, None]) & there_BN[:, :, None]
    token_BNN = token_BNN & there_BN[:, None]
    for _ in range(depth):
        above_BN = first_BN.gather(1, parents_BN.clamp_min(0))
        alike_BNN = token_BNN & (above_BN[:, :, None] == above_BN[:, None])
        first_BN = (alike_BNN | itself_NN).to(torch.uint8).argmax(2)
    return first_BN


def _trials(first_BN: Tensor, merged_BN: Tensor, own_BN: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The child that each trial at a node drew, and the number of its distribution. int64 [B, N, C] each, C = T.

    Distributions are numbered as all drafts' nodes side by side, roots included: a trial was drawn
    from the distribution of its own parent.
    """
    B, N = first_BN.shape
    T = N - 1
    above_BT, child_BT = merged_BN[:, 1:], first_BN[:, 1:]
    turn_BT = (above_BT[:, :, None] == above_BT[:, None]).tril(-1).sum(2)
    # absent nodes are no trials: they go to a row that is cut off
    slot_BT = torch.where(above_BT < 0, N, above_BT) * T + turn_BT
    draft_T = torch.cat([first_BN.new_full((size,), m) for m, size in enumerate(sizes)])
    root_T = torch.cat([first_BN.new_full((size,), m + sum(sizes[:m])) for m, size in enumerate(sizes)])
    q_index_BT = torch.where(own_BN[:, 1:] > 0, own_BN[:, 1:] + draft_T, root_T)
    child_BX = first_BN.new_full((B, (N + 1) * T), -1).scatter(1, slot_BT, child_BT)
    q_index_BX = first_BN.new_zeros(B, (N + 1) * T).scatter(1, slot_BT, q_index_BT)
    return child_BX.view(B, N + 1, T)[:, :N], q_index_BX.view(B, N + 1, T)[:, :N]
