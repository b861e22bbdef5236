"""The forward of a decoder, layer by layer, with the model's own weights: one loop for every device.

In a call of a few milliseconds `transformers`' layers spend more time on the way to their matrix products than in
them. Here the same numbers are computed with fewer operations: a sum and the norm after it are one step, query and
key are rotated together, projections with the same input are one product. Each device has a `LayerRunner`, which
computes the steps. Read next: `on_cpu.py`, `on_cuda.py`; `../backbone.py`, which calls this.

Shapes: B rows, N new tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..hidden_states import UNNORMED, HiddenStates
from ..kv_cache import KVCache
from ..windows import Masks
from .families import norms_of


class LayerRunner(Protocol):
    """How the steps of a layer are computed on a device."""

    def begin(self, positions_BN: Tensor, hidden_BNH: Tensor, mask: Masks | None, kv_cache: Any) -> None:
        """Prepare what all layers of a forward share."""

    def enter(self, hidden: Tensor, out: Tensor | None, post_norm: Any, norm: Any) -> tuple[Tensor, Tensor]:
        """`hidden + post_norm(out)`, and that under `norm`; `out` and `post_norm` may be None."""

    def attend(self, layer: Any, index: int, normed: Tensor) -> Tensor:
        """The output of the attention of layer `index`, [B, N, H]."""

    def feed_forward(self, layer: Any, index: int, normed: Tensor) -> Tensor:
        """The output of its feed-forward part, [B, N, H]."""

    def project(self, hidden: Tensor) -> Tensor:
        """Logits [B, N, V]."""


class KeyValueSlots(Protocol):
    """Where a forward keeps its keys and values: a KV cache, or slots that are dropped after each layer."""

    def stores(self, layer_idx: int, like_BNGD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, L, D] of a layer."""

    def slots_of(self, device: torch.device) -> Tensor:
        """Where the tokens of the running forward are written, int64 [B, N]."""

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Slots in view, and the first of them."""


def lean_forward(
    model: Any,
    runner: LayerRunner,
    tokens_BN: Tensor,
    mask: Masks | None,
    positions_BN: Tensor,
    kv_cache: KVCache,
    *,
    keep: int,
    states: HiddenStates,
) -> Tensor:
    """Logits [B, N, V] (of the last `keep` tokens if `keep` > 0); `states` takes those that it was asked for."""
    normed = lean_states(model.model, runner, tokens_BN, mask, positions_BN, kv_cache, states=states)
    return runner.project(normed[:, -keep:] if keep else normed)


def lean_states(
    decoder: Any,
    runner: LayerRunner,
    tokens_BN: Tensor,
    mask: Masks | None,
    positions_BN: Tensor,
    slots: Any,
    *,
    states: HiddenStates,
) -> Tensor:
    """What the output projection reads, [B, N, H]; `states` takes those that it was asked for.

    `slots`: a KV cache; on a GPU any `KeyValueSlots`.
    """
    hidden = decoder.embed_tokens(tokens_BN)
    runner.begin(positions_BN, hidden, mask, slots)
    out = post_norm = None
    for index, layer in enumerate(decoder.layers):
        before_attention, after_attention, before_feed_forward, after_all = norms_of(layer)
        hidden, normed = runner.enter(hidden, out, post_norm, before_attention)
        states.take(index, hidden)
        out = runner.attend(layer, index, normed)
        hidden, normed = runner.enter(hidden, out, after_attention, before_feed_forward)
        out, post_norm = runner.feed_forward(layer, index, normed), after_all
    hidden, normed = runner.enter(hidden, out, post_norm, decoder.norm)
    states.take(UNNORMED, hidden)
    states.take(len(decoder.layers), normed)
    return normed
