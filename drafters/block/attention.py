"""Attention of a block drafter: over the target's states before the block, and the block's own slots.

The network is one; only where keys are kept differs. While decoding they are in a KV cache (`Cached`).
In training many blocks stand in a row of packed documents (`Packed`), and each sees the states before
its anchor and itself: what a slot makes of its own block joins its softmax over the states as one more key
(`../layers/sinks.py`). Read next: `net.py`, the layers.

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

from ...decoding.backbone.kv_cache import KVCache
from ...decoding.backbone.windows import Window
from ..layers.llama import Projected, attend
from ..layers.sinks import Keys, SunkContext


class SlotView(NamedTuple):
    """What the slots of a layer see."""

    window: Window | None
    """Of the text, counted back from the slot's own position; a block is no longer than it."""
    causal: bool
    """Of their block the earlier ones alone."""


class View(Protocol):
    """What slots see beside themselves, and how it is kept."""

    def attend(self, layer: int, own: Projected, group: int) -> Tensor:
        """Attention of a layer's slots [R, Q, N, D]; `group`: query heads of a key-value head."""


@dataclass(frozen=True)
class Cached:
    """One block per row behind the states that a KV cache holds; the cache is aimed at the block."""

    kv_cache: KVCache
    masks: Sequence[Tensor | None]
    """Of every layer, bool, broadcastable to [R, 1, N, T]; None for one slot that sees all."""

    def attend(self, layer: int, own: Projected, group: int) -> Tensor:
        """As `View`; the block's keys are written behind its row's states, where nothing keeps them."""
        key, value = self.kv_cache.update(own.key_BGND, own.value_BGND, layer)
        return attend(own.query_BQND, key, value, self.masks[layer], group)


class Packed:
    """Blocks of packed rows: slot n belongs to block n // B of its row."""

    def __init__(
        self,
        contexts: Sequence[Keys],
        documents_RS: Tensor,
        anchor_RA: Tensor,
        slots: int,
        seen: Sequence[SlotView],
        *,
        masked: bool = True,
    ) -> None:
        """The blocks behind some anchors.

        Args:
            contexts: of every layer.
            documents_RS: number of the document that a state belongs to.
            anchor_RA: where blocks begin.
            slots: B.
            seen: of every layer.
            masked: make the mask of slots by states; else some slots attend after others.
        """
        self._contexts, self._slots, self._seen = contexts, slots, seen
        # nothing at the anchor: the target has not read its token when a block is drafted
        self._texts = {
            window: SunkContext(documents_RS, anchor_RA, behind=0, repeats=slots, masked=masked, window=window)
            for window in dict.fromkeys(each.window for each in seen)
        }

    def attend(self, layer: int, own: Projected, group: int) -> Tensor:
        """As `View`."""
        window, causal = self._seen[layer]
        inside = self._inside(own, group, causal=causal)
        return self._texts[window].attend(own.query_BQND, self._contexts[layer], *inside, group)

    def _inside(self, own: Projected, group: int, *, causal: bool) -> tuple[Tensor, Tensor]:
        """What slots make of their own block [R, Q, N, D], and the log-sum-exp of its scores, fp32 [R, Q, N]."""
        # a key-value head's queries side by side: keys are looked at where they are, never repeated
        query_RGMABD = own.query_BQND.unflatten(2, (-1, self._slots)).unflatten(1, (-1, group))
        key_RG1ABD, value_RG1ABD = (
            x.unflatten(2, (-1, self._slots))[:, :, None] for x in (own.key_BGND, own.value_BGND)
        )
        scale = query_RGMABD.shape[-1] ** -0.5
        score_RGMABB = (query_RGMABD @ key_RG1ABD.transpose(-1, -2)).float() * scale
        if causal:
            later_BB = torch.ones(self._slots, self._slots, dtype=torch.bool, device=score_RGMABB.device).triu(1)
            score_RGMABB = score_RGMABB.masked_fill(later_BB, -torch.inf)
        out_RGMABD = score_RGMABB.softmax(-1).to(value_RG1ABD.dtype) @ value_RG1ABD
        return out_RGMABD.flatten(3, 4).flatten(1, 2), score_RGMABB.logsumexp(-1).flatten(3, 4).flatten(1, 2)
