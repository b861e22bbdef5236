"""Which true pairs P-EAGLE's mask pairs stand behind in a step, and how deep: conditional drop-token sampling.

Of the pairs that have a label, depth d keeps the share max(kept^d, kept_least) (P-EAGLE, arXiv 2602.01469).
Depth d + 1 chooses among those that depth d has kept, so that every mask pair has the shallower ones of its own
branch, and a branch ends in front of the first token that is no label or of another document. What is kept is a
function of the step's seed and the row's content, so that a resumed run, other micro-batches and other processes
train on the same pairs; the host works it out, and waits for no device. Read next: `peagle.py`, the trainer;
`drafters/eagle/peagle.py`, who sees whom.

Shapes: R rows, S tokens of a row, A anchors of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...data.features.store import row_keys
from ...decoding.on_host import all_on_host, sent
from ..labels import has_label
from ..loop.objective import Batch
from ..loop.order import scores

_STEP = 32
"""Mask pairs of a depth are a multiple of it: few sizes, for each of which a CPU keeps a kernel."""


class Sampled(NamedTuple):
    """The branches of some rows."""

    at_RA: Tensor
    """int64: the anchors, those of the longest branches first; arbitrary where a row has fewer."""
    known: tuple[Tensor, ...]
    """Of depth 1, 2, ...: bool [R, A_d], which of the first A_d anchors have a mask pair there that counts."""

    @property
    def counts(self) -> list[int]:
        """Pairs of depth 1, 2, ... of a row, those that do not count included."""
        return [known_RA.shape[1] for known_RA in self.known]


def share(kept: float, least: float, depth: int) -> float:
    """Of all pairs with a label, those that depth `depth` keeps at most."""
    return max(kept**depth, least)


def sampled(batch: Batch, depths: int, kept: float, least: float, seed: int) -> Sampled:
    """Branches of every row, for `depths` drafts: mask pairs of depth 1 to `depths` - 1."""
    known, device = all_on_host(batch), batch["input_ids"].device
    S = known["input_ids"].shape[1]
    order_RS = torch.from_numpy(np.stack([scores(f"{seed}/{key}", S) for key in row_keys(known)])).argsort(-1)
    chosen_RS = _labelled(known, 0)
    total_R1 = chosen_RS.sum(1, keepdim=True)
    depth_RS = torch.zeros_like(order_RS)
    for d in range(1, depths):
        can_RS = chosen_RS & _labelled(known, d)
        most_R1 = (total_R1 * share(kept, least, d)).ceil()
        # in the order of the draw, the first ones that can
        ordered_RS = can_RS.gather(1, order_RS)
        ordered_RS = ordered_RS & (ordered_RS.cumsum(1) <= most_R1)
        chosen_RS = torch.zeros_like(can_RS).scatter(1, order_RS, ordered_RS)
        depth_RS += chosen_RS
    longest_RS = depth_RS.sort(dim=1, descending=True, stable=True)
    counts_Rd = torch.stack([(depth_RS >= d).sum(1) for d in range(1, depths)], 1)
    sizes = [_rounded(int(count), S) for count in counts_Rd.amax(0)]
    index_S = torch.arange(S)
    counted = (index_S[:size] < counts_Rd[:, d, None] for d, size in enumerate(sizes))
    return Sampled(
        sent(longest_RS.indices[:, : sizes[0]], device), tuple(sent(known_RA, device) for known_RA in counted)
    )


def _labelled(batch: Batch, depth: int) -> Tensor:
    """bool [R, S]: pairs t whose draft of that depth, x_{t+2+depth}, is a label of the same document."""
    ahead = 2 + depth
    S = batch["input_ids"].shape[1]
    found_RS = torch.zeros_like(batch["loss_mask"])
    if ahead < S:
        found_RS[:, : S - ahead] = has_label(batch, ahead)
    return found_RS


def _rounded(count: int, most: int) -> int:
    """At least one, so that the masks always have a gradient."""
    return min(most, max(1, -(-count // _STEP)) * _STEP)
