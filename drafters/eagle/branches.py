"""Attention of P-EAGLE in training: a text of true pairs, and branches of mask pairs behind some of them.

A mask pair (t, d) stands d places behind the anchor t. It sees the true pairs of its document up to t, and
of the mask pairs those of its own branch up to itself; true pairs see no mask pair. So the text is attended
as ever (`passes.py`), and what a mask pair makes of its own branch joins its softmax over the text as one
more key, a sink: exactly a softmax over both. Over short rows it is one kernel with a mask of mask pairs by text;
over long ones, where that would be large, block after block (`../block/spans.py`), and what is kept grows with the
row alone.
Read next: `peagle.py`, the network.

Shapes: B rows, S true pairs of a row, A anchors of a row, M mask pairs of a row (those of depth 1 first), Q
query heads, G key-value heads, D head size, X the sink and S true pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...decoding.on_host import on_host, sent
from ..block.spans import Spans, starts
from .layers import Projected, attend
from .passes import Keys, Passes, own_keys, scored, with_sink


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
        self._spans = None if masked else Spans(spans_of(documents_BS, _of_masks(on_host(at_BA), self._counts)))
        if masked:
            seen_BMS = seen(documents_BS, _of_masks(at_BA, self._counts))
            sink_BM1 = torch.ones_like(seen_BMS[..., :1])
            self._mask_B1MX = torch.cat((sink_BM1, seen_BMS), -1)[:, None]

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
        D = own_BQMD.shape[-1]
        scored_BQMD = scored(masks.query_BQND, total_BQM)
        both = self._over_text(scored_BQMD, with_sink(text.key_BGND, 2), with_sink(text.value_BGND, 1), D**-0.5)
        return torch.cat((out_BQSD, both[..., :D] + both[..., D : D + 1] * own_BQMD), 2)

    def _over_text(self, query_BQMD: Tensor, key_BGXD: Tensor, value_BGXD: Tensor, scale: float) -> Tensor:
        """Attention of the mask pairs over the sink and the text, [B, Q, M, D]."""
        if self._spans is None:
            return attend(query_BQMD, key_BGXD, value_BGXD, self._mask_B1MX, self._group, scale=scale)

        def of_block(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            return attend(query, key, value, mask, self._group, scale=scale).transpose(1, 2)

        return self._spans.attend(query_BQMD, key_BGXD, value_BGXD, of_block).transpose(1, 2)

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


def seen(documents_BS: Tensor, anchor_BM: Tensor) -> Tensor:
    """bool [B, M, S]: the true pairs that a mask pair sees, those of the anchor's document up to the anchor."""
    index_S = torch.arange(documents_BS.shape[1], device=anchor_BM.device)
    same_BMS = documents_BS.gather(1, anchor_BM)[..., None] == documents_BS[:, None]
    return same_BMS & (index_S <= anchor_BM[..., None])


def spans_of(documents_BS: Tensor, anchor_BM: Tensor) -> Tensor:
    """int64 [B, 1, M, 4], where documents are: the same as `Spans` takes it, where the sink is the first key of all.

    Args:
        documents_BS: number of every true pair's document.
        anchor_BM: on the host.
    """
    start_BM = starts(on_host(documents_BS)).gather(1, anchor_BM)
    none = torch.zeros_like(anchor_BM)
    seen_BM4 = torch.stack((none, none, start_BM + 1, anchor_BM + 1), -1)
    return sent(seen_BM4[:, None], documents_BS.device)


def _of_masks(at_BA: Tensor, counts: Sequence[int]) -> Tensor:
    """The anchor of every mask pair, those of depth 1 first, [B, M]."""
    return torch.cat([at_BA[:, :count] for count in counts], 1) if counts else at_BA[:, :0]
