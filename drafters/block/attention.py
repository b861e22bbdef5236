"""Attention of a block drafter: over the target's states before the block, and the block's own slots.

The network is one; only where keys are kept differs. While decoding they are in a KV cache (`Cached`).
In training many blocks stand in a row of packed documents (`Packed`), and each sees the states before
its anchor and itself. What a slot makes of its own block is then put in as one more key of the
context, a sink whose score is the log-sum-exp of the block's scores: exactly a softmax over both, and
no block ever meets another one. Over short rows it is one kernel with a mask of slots by states; over long
ones, where that would be large, some slots after others (`spans.py`), and what is kept grows with slots and
states alone, never with their product. Read next: `net.py`, the layers; `../eagle/passes.py`, where the sink
is from.

Shapes: R rows, S tokens of a row, A anchors of a row, B slots of a block, N slots of a forward pass
(A B in training), Q query heads, G key-value heads, M query heads of a key-value head, T keys in view,
D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...decoding.on_host import on_host, sent
from ...decoding.target.kv_cache import KVCache
from ..eagle.layers import Projected, attend
from ..eagle.passes import scored, with_sink
from .spans import Spans, starts


class Context(NamedTuple):
    """Keys and values that a layer makes of the target's states, turned to their positions."""

    key_RGSD: Tensor
    value_RGSD: Tensor


class View(Protocol):
    """What slots see beside themselves, and how it is kept."""

    def attend(self, layer: int, own: Projected, group: int) -> Tensor:
        """Attention of a layer's slots [R, Q, N, D]; `group`: query heads of a key-value head."""


@dataclass(frozen=True)
class Cached:
    """One block per row behind the states that a KV cache holds; the cache is aimed at the block."""

    kv_cache: KVCache
    mask: Tensor | None
    """bool, broadcastable to [R, 1, N, T]; None for one slot that sees all."""

    def attend(self, layer: int, own: Projected, group: int) -> Tensor:
        """As `View`; the block's keys are written behind its row's states, where nothing keeps them."""
        key, value = self.kv_cache.update(own.key_BGND, own.value_BGND, layer)
        return attend(own.query_BQND, key, value, self.mask, group)


class Packed:
    """Blocks of packed rows: slot n belongs to block n // B of its row."""

    def __init__(
        self,
        contexts: Sequence[Context],
        documents_RS: Tensor,
        anchor_RA: Tensor,
        slots: int,
        *,
        causal: bool,
        masked: bool = True,
    ) -> None:
        """The blocks behind some anchors.

        Args:
            contexts: of every layer.
            documents_RS: number of the document that a state belongs to.
            anchor_RA: where blocks begin.
            slots: B.
            causal: whether a slot sees the earlier ones of its block alone.
            masked: make the mask of slots by states; else some slots attend after others.
        """
        self._contexts, self._slots, self._causal = contexts, slots, causal
        self._spans = None if masked else Spans(spans_of(documents_RS, anchor_RA).repeat_interleave(slots, 2))
        if masked:
            seen_RAS = seen(documents_RS, anchor_RA)
            sink_RA1 = torch.ones_like(seen_RAS[..., :1])
            self._mask_R1NT = torch.cat((sink_RA1, seen_RAS), -1).repeat_interleave(slots, 1)[:, None]

    def attend(self, layer: int, own: Projected, group: int) -> Tensor:
        """As `View`."""
        query_RQND, D = own.query_BQND, own.query_BQND.shape[-1]
        out_RQND, total_RQN = self._inside(own, group)
        both = self._over_states(scored(query_RQND, total_RQN), self._contexts[layer], group, D**-0.5)
        return both[..., :D] + both[..., D : D + 1] * out_RQND

    def _over_states(self, query_RQND: Tensor, context: Context, group: int, scale: float) -> Tensor:
        """Attention over the sink and the states, [R, Q, N, D]."""
        key_RGTD, value_RGTD = with_sink(context.key_RGSD, 2), with_sink(context.value_RGSD, 1)
        if self._spans is None:
            return attend(query_RQND, key_RGTD, value_RGTD, self._mask_R1NT, group, scale=scale)

        def of_some(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            return attend(query, key, value, mask, group, scale=scale).transpose(1, 2)

        return self._spans.attend(query_RQND, key_RGTD, value_RGTD, of_some).transpose(1, 2)

    def _inside(self, own: Projected, group: int) -> tuple[Tensor, Tensor]:
        """What slots make of their own block [R, Q, N, D], and the log-sum-exp of its scores, fp32 [R, Q, N]."""
        # a key-value head's queries side by side: keys are looked at where they are, never repeated
        query_RGMABD = own.query_BQND.unflatten(2, (-1, self._slots)).unflatten(1, (-1, group))
        key_RG1ABD, value_RG1ABD = (
            x.unflatten(2, (-1, self._slots))[:, :, None] for x in (own.key_BGND, own.value_BGND)
        )
        scale = query_RGMABD.shape[-1] ** -0.5
        score_RGMABB = (query_RGMABD @ key_RG1ABD.transpose(-1, -2)).float() * scale
        if self._causal:
            later_BB = torch.ones(self._slots, self._slots, dtype=torch.bool, device=score_RGMABB.device).triu(1)
            score_RGMABB = score_RGMABB.masked_fill(later_BB, -torch.inf)
        out_RGMABD = score_RGMABB.softmax(-1).to(value_RG1ABD.dtype) @ value_RG1ABD
        return out_RGMABD.flatten(3, 4).flatten(1, 2), score_RGMABB.logsumexp(-1).flatten(3, 4).flatten(1, 2)


def seen(documents_RS: Tensor, anchor_RA: Tensor) -> Tensor:
    """bool [R, A, S]: the states that a block sees, those of its document below its anchor."""
    index_S = torch.arange(documents_RS.shape[1], device=anchor_RA.device)
    same_RAS = documents_RS.gather(1, anchor_RA)[..., None] == documents_RS[:, None]
    # strictly below: the target has not read the anchor's token when a block is drafted
    return same_RAS & (index_S < anchor_RA[..., None])


def spans_of(documents_RS: Tensor, anchor_RA: Tensor) -> Tensor:
    """int64 [R, 1, A, 4]: the same as `Spans` takes it, where the sink is the first key of all."""
    anchors = on_host(anchor_RA)
    start_RA = starts(on_host(documents_RS)).gather(1, anchors)
    none = torch.zeros_like(anchors)
    # the sink moves every state one place up, so the anchor's number is the last one's below it
    seen_RA4 = torch.stack((none, none, start_RA + 1, anchors), -1)
    return sent(seen_RA4[:, None], anchor_RA.device)
