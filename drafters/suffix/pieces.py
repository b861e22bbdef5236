"""A step as several smaller ones: how a drafter is told of more tokens than it drafts at once.

Read next: `hybrid.py`.

Shapes: B rows, N nodes of the proposal, D depths, E tokens of a piece, K = E - 1, Y numbers of a node.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...decoding.proposal import Committed, pick


def pieces(
    committed: Committed, last_B: Tensor, *, first_B: Tensor, most: int, longest: int, first: int, counted: bool
) -> Iterator[tuple[Committed, Tensor]]:
    """What was committed as steps of up to `most` tokens, each on a chain of its own.

    Args:
        last_B: the last token emitted before.
        first_B: tokens of each row's first piece, at most.
        longest: tokens emitted by a row whose first piece has `first`, at most; the other rows' first
            piece is their last.
        counted: whether to stop where the rows have nothing left, which waits for the device.

    Yields:
        Each piece, and the last token emitted before it.
    """
    root_B1 = torch.zeros_like(committed.count_B)[:, None]
    node_BE = torch.cat([root_B1, committed.path_BD.clamp_min(0)], 1)
    done_B, room_B = torch.zeros_like(committed.count_B), first_B
    for number in range(1 + -(-max(0, longest - first) // most)):
        take_B = torch.minimum(committed.count_B - done_B, room_B).clamp_min(0)
        if counted and number and not int(take_B.max()):
            return
        yield _piece(committed, node_BE, done_B, take_B, most), last_B
        done_B = done_B + take_B
        newest_B = committed.tokens_BE.gather(1, (done_B - 1).clamp_min(0)[:, None])[:, 0]
        last_B = torch.where(take_B > 0, newest_B, last_B)
        room_B = torch.full_like(room_B, most)


def _piece(committed: Committed, node_BE: Tensor, done_B: Tensor, take_B: Tensor, most: int) -> Committed:
    """`take_B` tokens after the first `done_B`. A row that gets none is at its last accepted node, as before."""
    start_B = torch.where(take_B > 0, done_B, (committed.count_B - 1).clamp_min(0))
    at_E = torch.arange(most, device=start_B.device)
    from_BE = (start_B[:, None] + at_E).clamp_max(node_BE.shape[1] - 1)
    nodes_BE = node_BE.gather(1, from_BE)
    path_BK = torch.where(at_E[1:] < take_B[:, None], at_E[1:], -1)
    features_BNF = committed.features_BNF
    return Committed(
        committed.tokens_BE.gather(1, from_BE),
        take_B,
        path_BK,
        pick(committed.logits_BNV, nodes_BE),
        None if features_BNF is None else pick(features_BNF, nodes_BE),
        is_chain=True,
    )
