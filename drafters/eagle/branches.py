"""Attention of P-EAGLE in training: a text of true pairs, and branches of mask pairs behind some of them.

A mask pair (t, d) stands d places behind the anchor t. It sees the true pairs of its document up to t, and
of the mask pairs those of its own branch up to itself; true pairs see no mask pair. So the text is attended
as ever (`../layers/passes.py`), and what a mask pair makes of its own branch joins its softmax over the text as one
more key, a sink (`../layers/sunk.py`). Read next: `peagle.py`, the network.

Shapes: B rows, S true pairs of a row, A anchors of a row, M mask pairs of a row (those of depth 1 first), Q
query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...decoding.on_host import on_host
from ..layers.llama import Projected
from ..layers.passes import Passes
from ..layers.sinks import Keys, own_keys
from ..layers.sunk import SunkContext


class Branches:
    """What the true pairs and the mask pairs of some rows see, for every layer alike."""

    def __init__(
        self, documents_BS: Tensor, at_BA: Tensor, counts: Sequence[int], group: int, *, masked: bool = True
    ) -> None:
        """The pairs of depth d are behind the first `counts[d - 1]` anchors of a row, so counts never grow.

        Args:
            documents_BS: number of every true pair's document.
            at_BA: the true pair that each anchor is.
            group: query heads of a key's head.
            masked: make the mask of mask pairs by text; else they attend block after block.
        """
        self._text, self._counts, self._group = Passes(documents_BS, group), tuple(counts), group
        # a mask is made on the device; spans are counted on the host, which knows where anchors are
        anchor_BM = _of_masks(at_BA if masked else on_host(at_BA), self._counts)
        self._context = SunkContext(documents_BS, anchor_BM, behind=1, masked=masked)

    def attend(self, pairs: Projected) -> Tensor:
        """Attention of S true pairs and, behind them, M mask pairs: [B, Q, S + M, D]."""
        M = sum(self._counts)
        S = pairs.query_BQND.shape[2] - M
        text = Projected(*(x[:, :, :S] for x in pairs))
        out_BQSD = self._text.first(text)
        if not M:
            return out_BQSD
        masks = Projected(*(x[:, :, S:] for x in pairs))
        own_BQMD, total_BQM = self._own(masks)
        texts = Keys(text.key_BGND, text.value_BGND)
        both_BQMD = self._context.attend(masks.query_BQND, texts, own_BQMD, total_BQM, self._group)
        return torch.cat((out_BQSD, both_BQMD), 2)

    def _own(self, masks: Projected) -> tuple[Tensor, Tensor]:
        """What mask pairs make of their own branch [B, Q, M, D], and the log-sum-exp of its scores [B, Q, M]."""
        queries, keys, values = (x.split(self._counts, 2) for x in masks)
        outs, totals = [], []
        for d, count in enumerate(self._counts):
            # the first anchors have the longest branches: a shallower pair of the same one has the same place
            branch = [Keys(keys[j][:, :, :count], values[j][:, :, :count]) for j in range(d + 1)]
            out, total = own_keys(queries[d], branch, self._group)
            outs.append(out)
            totals.append(total)
        return torch.cat(outs, 2), torch.cat(totals, 2)


def _of_masks(at_BA: Tensor, counts: Sequence[int]) -> Tensor:
    """The anchor of every mask pair, those of depth 1 first, [B, M]."""
    return torch.cat([at_BA[:, :count] for count in counts], 1) if counts else at_BA[:, :0]
