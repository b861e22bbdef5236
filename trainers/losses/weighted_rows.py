"""Training rows with a weight per label; labels of weight 0 are left out.

Read next: `boost.py`, whose weights follow from what earlier SSMs cover; `loop/loop.py`, which trains on them.

Shapes: R rows, S tokens of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...data.rows.packed import PackedRows
from ..loop.objective import Batch


class WeightedRows:
    """The rows that still have a label; a batch's `share` is the weight of each label.

    Weights are scaled to a mean of 1 over the labels that are left, so that the learning rate keeps
    its meaning. Where all are equal there is no `share`.
    """

    def __init__(self, rows: PackedRows, weight_RS: Tensor) -> None:
        """`weight_RS`: fp32, 0 for a label that is left out."""
        self._rows = rows
        kept_RS = weight_RS > 0
        self._index = kept_RS.any(1).nonzero()[:, 0].tolist()
        self._kept_RS = kept_RS
        left = weight_RS[kept_RS]
        alike = len(left) == 0 or bool((left == left[0]).all())
        self._share_RS = None if alike else weight_RS / left.mean()

    def __len__(self) -> int:
        return len(self._index)

    def batch(self, rows: list[int]) -> Batch:
        """As `PackedRows.batch`, without the labels that are left out in `loss_mask`."""
        chosen = [self._index[row] for row in rows]
        batch = self._rows.batch(chosen)
        batch["loss_mask"] = batch["loss_mask"] & self._kept_RS[chosen]
        if self._share_RS is not None:
            batch["share"] = torch.as_tensor(self._share_RS[chosen])
        return batch
