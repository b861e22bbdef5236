"""Keys that a query has for itself, as one more key of an ordinary attention: a sink.

Its score is the log-sum-exp of theirs, which is exactly a softmax over all of them.

What a query makes of keys of its own kind (the slots of its block, the mask pairs of its branch) is put in as one more
key of the text, a sink whose score is the log-sum-exp of their scores: exactly a softmax over both, and no block or
branch ever meets another one. Over short rows it is one kernel with a mask of queries by text; over long ones, where
that would be large, some queries after others (`spans.py`), and what is kept grows with queries and text alone, never
with their product.
Shapes: B rows, S tokens of a row, A anchors of a row, M queries of a row (as many for each anchor), Q query heads, G
key-value heads, D head size, X the sink and S tokens.

Read next: `passes.py`, EAGLE's later passes.

Shapes: B rows, N queries, J later passes, Q query heads, G key-value heads, M query heads of a key-value head, D head
size, K documents of a group, L pairs of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...decoding.backbone.windows import Window
from ...decoding.on_host import on_host, sent
from .llama import attend
from .spans import Spans, first_seen, starts

EXTRA = 8
"""Numbers added to a head for the sink: two are used, kernels want a multiple of eight."""


class Keys(NamedTuple):
    """Keys and values, turned to their positions."""

    key_BGND: Tensor
    value_BGND: Tensor


def by_own_keys(query_BQND: Tensor, later: Sequence[Keys], group: int) -> tuple[Tensor, Tensor]:
    """What `own_keys` finds, [B, Q, N, D], and the queries that know of it (`scored`)."""
    own_BQND, total_BQN = own_keys(query_BQND, later, group)
    return own_BQND, scored(query_BQND, total_BQN)


def own_keys(query_BQND: Tensor, later: Sequence[Keys], group: int) -> tuple[Tensor, Tensor]:
    """Attention over the keys of later passes at the query's own position.

    Returns:
        What comes of it, [B, Q, N, D], and the log-sum-exp of its scores, fp32 or better [B, Q, N].
    """
    # a key-value head's queries side by side: keys are looked at where they are, never repeated
    query_BGMND = query_BQND.unflatten(1, (-1, group))
    scale = query_BQND.shape[-1] ** -0.5
    scores = [(query_BGMND * each.key_BGND[:, :, None]).float().sum(-1) * scale for each in later]
    score_JBGMN = torch.stack(scores)
    weight_JBGMN = score_JBGMN.softmax(0).to(query_BQND.dtype)
    out_BGMND = torch.zeros_like(query_BGMND)
    for weight_BGMN, each in zip(weight_JBGMN, later, strict=True):
        out_BGMND = out_BGMND + weight_BGMN[..., None] * each.value_BGND[:, :, None]
    return out_BGMND.flatten(1, 2), score_JBGMN.logsumexp(0).flatten(1, 2)


def scored(query_BQND: Tensor, total_BQN: Tensor) -> Tensor:
    """Queries, longer by the sink's score: [B, Q, N, D + EXTRA], for a kernel that scales scores by D^-0.5.

    Args:
        total_BQN: log-sum-exp of the scores that the sink stands for, fp32 or better.
    """
    # in two parts, or half precision would round the score
    score_BQN1 = (total_BQN * query_BQND.shape[-1] ** 0.5)[..., None]
    high = score_BQN1.to(query_BQND.dtype)
    rest = (score_BQN1 - high.float()).to(query_BQND.dtype)
    return F.pad(torch.cat((query_BQND, high, rest), -1), (0, EXTRA - 2))


def with_sink(x_KGLD: Tensor, ones: int) -> Tensor:
    """One more position at the front: zeros, but `ones` of the added numbers are 1.

    Of keys two, which `scored` speaks to; of values one, so that the sink's weight comes out as a number.
    """
    D = x_KGLD.shape[-1]
    wide = F.pad(x_KGLD, (0, EXTRA, 1, 0))
    wide[:, :, 0, D : D + ones] = 1
    return wide


def with_own(out: Tensor, own_BQND: Tensor) -> Tensor:
    """Attention over sunk keys with what the sink stands for, by the weight that came out of it. [B, Q, N, D]."""
    D = own_BQND.shape[-1]
    return out[..., :D] + out[..., D : D + 1] * own_BQND


class SunkContext:
    """What the queries behind some anchors see of their rows' texts, for every layer alike."""

    def __init__(
        self,
        documents_BS: Tensor,
        anchor_BA: Tensor,
        *,
        behind: int,
        repeats: int = 1,
        masked: bool = True,
        window: Window | None = None,
    ) -> None:
        """A query sees its anchor's document in front of `behind` places behind the anchor.

        Args:
            documents_BS: number of the document that a token belongs to.
            anchor_BA: where the anchors stand; without a mask its numbers are asked of the host.
            behind: 0: the anchor itself is not seen; 1: it is the last that is.
            repeats: queries of an anchor, side by side.
            masked: make the mask of queries by text; else some queries attend after others.
            window: how far back a query sees, its queries standing one behind the other from the anchor on.
        """
        self._spans = None if masked else Spans(spans_of(documents_BS, anchor_BA, behind, repeats, window))
        if masked:
            seen_BMS = seen(documents_BS, anchor_BA, behind).repeat_interleave(repeats, 1)
            if window is not None:
                index_1S = torch.arange(documents_BS.shape[1], device=anchor_BA.device)[None]
                seen_BMS = seen_BMS & window.near(in_a_row(anchor_BA, repeats), index_1S)[:, 0]
            self._mask_B1MX = torch.cat((torch.ones_like(seen_BMS[..., :1]), seen_BMS), -1)[:, None]

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


def in_a_row(anchor_BA: Tensor, repeats: int) -> Tensor:
    """int64 [B, M]: where the queries of anchors stand, one behind the other."""
    steps = torch.arange(repeats, device=anchor_BA.device)
    return (anchor_BA[..., None] + steps).flatten(1)


def spans_of(
    documents_BS: Tensor, anchor_BA: Tensor, behind: int, repeats: int, window: Window | None = None
) -> Tensor:
    """int64 [B, 1, M, 4], where documents are: the same as `Spans` takes it, the sink being the first key of all."""
    anchors = on_host(anchor_BA)
    start_BM = starts(on_host(documents_BS)).gather(1, anchors).repeat_interleave(repeats, 1)
    first_BM = first_seen(start_BM, in_a_row(anchors, repeats), window)
    last_BM = (anchors + behind).repeat_interleave(repeats, 1)
    none = torch.zeros_like(last_BM)
    # the sink moves the text one place up, so this is the last place that is seen
    return sent(torch.stack((none, none, first_BM + 1, last_BM), -1)[:, None], documents_BS.device)
