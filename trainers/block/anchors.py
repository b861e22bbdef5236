"""Which tokens of a row blocks begin at, and which of a block's drafts have a label.

An anchor is a token whose successor is a label of the same document: any token that an answer could be
drafted behind. Blocks are drawn anew in every step, by the step's seed and the row's content alone, so
that a resumed run, other micro-batches and other processes train on the same ones; and on the host, which need not
wait for a device to know how many drafts have a label. Read next: `student.py`, the loss;
`drafters/block/net.py`, the blocks.

Shapes: R rows, S tokens of a row, A anchors of a row, K drafts of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...data.features.store import row_keys
from ...decoding.on_host import all_on_host, sent
from ..loop.objective import Batch
from ..loop.order import scores

HELD_OUT_SEED = 0
"""What is drawn for held-out rows (blocks, masks, mask pairs) is the same at every measurement."""


class Anchors(NamedTuple):
    """Where the blocks of some rows begin, and what counts of them."""

    at_RA: Tensor
    """int64, ascending; arbitrary where a row has fewer tokens that a block can begin at."""
    label_RAK: Tensor
    """int64: where the label of each draft stands, at + 1 + k; at most the row's last token."""
    known_RAK: Tensor
    """bool: whether it has one."""


def drawn(batch: Batch, count: int, depth: int, seed: int) -> Anchors:
    """At most `count` anchors of every row, all alike likely; `depth`: drafts of a block."""
    known, device = all_on_host(batch), batch["input_ids"].device
    can_RS = can_begin(known)
    S = can_RS.shape[1]
    score_RS = np.stack([scores(f"{seed}/{key}", S) for key in row_keys(known)])
    # those that cannot begin a block come last
    order_RS = (torch.from_numpy(score_RS) + 2.0 * ~can_RS).argsort(-1)
    chosen_RA = order_RS[:, :count].sort(-1).values
    return Anchors(*(sent(each, device) for each in anchors_at(known, chosen_RA, depth)))


def anchors_at(batch: Batch, at_RA: Tensor, depth: int) -> Anchors:
    """Labels of the blocks that begin at some tokens.

    A block ends in front of the first token that is no label or of another document, as a text that is
    decoded ends there; a token that no block can begin at has none.
    """
    S = batch["input_ids"].shape[1]
    place_RAK = at_RA[..., None] + 1 + torch.arange(depth, device=at_RA.device)
    label_RAK = place_RAK.clamp_max(S - 1)
    flat = label_RAK.flatten(1)
    document_RAK = batch["documents"].gather(1, flat).view_as(label_RAK)
    counts_RAK = batch["loss_mask"].gather(1, flat).view_as(label_RAK) & (place_RAK < S)
    same_RAK = document_RAK == batch["documents"].gather(1, at_RA)[..., None]
    return Anchors(at_RA, label_RAK, (counts_RAK & same_RAK).long().cumprod(-1).bool())


def can_begin(batch: Batch) -> Tensor:
    """bool [R, S]: tokens whose successor is a label of the same document."""
    can_RS = torch.zeros_like(batch["loss_mask"])
    documents_RS = batch["documents"]
    can_RS[:, :-1] = batch["loss_mask"][:, 1:] & (documents_RS[:, 1:] == documents_RS[:, :-1])
    return can_RS
