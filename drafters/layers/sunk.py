"""Attention in training to the packed text before an anchor, with the rest of the softmax as a sink.

A query also attends to keys of its own kind: the slots of its block, or the mask pairs of its branch. Their part is
one more key of the text, a sink whose score is the log-sum-exp of their scores. That is exactly a softmax over both,
and no block or branch ever meets another one. Short rows take one kernel with a mask of queries by text. In long rows
that mask would be large, so queries attend in spans, one span after another (`spans.py`); memory then grows with
queries and with text, not with their product. Read next: `../block/attention.py` and `../eagle/branches.py`, whose
text it is; `sinks.py`, where the sink is from.

Shapes: B rows, S tokens of a row, A anchors of a row, M queries of a row (as many for each anchor), Q query heads, G
key-value heads, D head size, X the sink and S tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...decoding.on_host import on_host, sent
from .llama import attend
from .sinks import Keys, scored, with_own, with_sink
from .spans import Spans, starts


class SunkContext:
    """What the queries behind some anchors see of their rows' texts, for every layer alike."""

    def __init__(
        self, documents_BS: Tensor, anchor_BA: Tensor, *, behind: int, repeats: int = 1, masked: bool = True
    ) -> None:
        """A query sees its anchor's document in front of `behind` places behind the anchor.

        Args:
            documents_BS: number of the document that a token belongs to.
            anchor_BA: where the anchors stand; without a mask its numbers are asked of the host.
            behind: 0: the anchor itself is not seen; 1: it is the last that is.
            repeats: queries of an anchor, side by side.
            masked: make the mask of queries by text; else some queries attend after others.
        """
        self._spans = None if masked else Spans(spans_of(documents_BS, anchor_BA, behind, repeats))
        if masked:
            seen_BAS = seen(documents_BS, anchor_BA, behind)
            sink_BA1 = torch.ones_like(seen_BAS[..., :1])
            self._mask_B1MX = torch.cat((sink_BA1, seen_BAS), -1).repeat_interleave(repeats, 1)[:, None]

    def attend(self, query_BQMD: Tensor, text: Keys, own_BQMD: Tensor, total_BQM: Tensor, group: int) -> Tensor:
        """Attention over the text and a query's own keys, [B, Q, M, D].

        Args:
            text: keys and values of the rows' texts.
            own_BQMD: what queries make of their own keys.
            total_BQM: the log-sum-exp of the scores of those, fp32 or better.
            group: query heads of a key's head.
        """
        scale = query_BQMD.shape[-1] ** -0.5
        query, key, value = scored(query_BQMD, total_BQM), with_sink(text.key_BGND, 2), with_sink(text.value_BGND, 1)
        if self._spans is None:
            return with_own(attend(query, key, value, self._mask_B1MX, group, scale=scale), own_BQMD)

        def of_some(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            return attend(query, key, value, mask, group, scale=scale).transpose(1, 2)

        return with_own(self._spans.attend(query, key, value, of_some).transpose(1, 2), own_BQMD)


def seen(documents_BS: Tensor, anchor_BA: Tensor, behind: int) -> Tensor:
    """bool [B, A, S]: what is seen of the text, without the sink."""
    index_S = torch.arange(documents_BS.shape[1], device=anchor_BA.device)
    same_BAS = documents_BS.gather(1, anchor_BA)[..., None] == documents_BS[:, None]
    return same_BAS & (index_S < anchor_BA[..., None] + behind)


def spans_of(documents_BS: Tensor, anchor_BA: Tensor, behind: int, repeats: int) -> Tensor:
    """int64 [B, 1, M, 4], where documents are: the same as `Spans` takes it, the sink being the first key of all."""
    anchors = on_host(anchor_BA)
    start_BA = starts(on_host(documents_BS)).gather(1, anchors)
    none = torch.zeros_like(anchors)
    # the sink moves the text one place up, so this is the last place that is seen
    seen_BA4 = torch.stack((none, none, start_BA + 1, anchors + behind), -1)
    return sent(seen_BA4.repeat_interleave(repeats, 1)[:, None], documents_BS.device)
