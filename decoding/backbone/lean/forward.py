"""The forward of a decoder, layer by layer, with the model's own weights: one loop for every device.

In a call of a few milliseconds `transformers`' layers spend more time on the way to their matrix products than in
them. Here the same numbers are computed with fewer operations: a sum and the norm behind it are one step, query and
key are turned together, projections that read the same are one product. How a step is computed is the way of the
device. Read next: `on_cpu.py`, `on_cuda.py`; `../backbone.py`, which calls this.

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


class Way(Protocol):
    """How the steps of a layer are computed on a device."""

    def begin(self, positions_BN: Tensor, hidden_BNH: Tensor, mask: Masks | None, kv_cache: Any) -> None:
        """Prepare what all layers of a forward share."""

    def enter(self, hidden: Tensor, out: Tensor | None, behind: Any, norm: Any) -> tuple[Tensor, Tensor]:
        """`hidden + behind(out)`, and that under `norm`; `out` and `behind` may be None."""

    def attend(self, layer: Any, index: int, normed: Tensor) -> Tensor:
        """What the attention of layer `index` puts out, [B, N, H]."""

    def feed_forward(self, layer: Any, index: int, normed: Tensor) -> Tensor:
        """What its feed-forward part puts out, [B, N, H]."""

    def project(self, hidden: Tensor) -> Tensor:
        """Logits [B, N, V]."""


class Held(Protocol):
    """Where keys and values of a forward are kept: a KV cache, or what is forgotten behind each layer."""

    def stores(self, layer_idx: int, like_BNGD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, L, D] of a layer."""

    def slots_of(self, device: torch.device) -> Tensor:
        """Where the tokens of the running forward are written, int64 [B, N]."""

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Slots in view, and the first of them."""


def lean_forward(
    model: Any,
    way: Way,
    tokens_BN: Tensor,
    mask: Masks | None,
    positions_BN: Tensor,
    kv_cache: KVCache,
    *,
    keep: int,
    states: HiddenStates,
) -> Tensor:
    """Logits [B, N, V] (of the last `keep` tokens if `keep` > 0); `states` takes those that it was asked for."""
    normed = lean_states(model.model, way, tokens_BN, mask, positions_BN, kv_cache, states=states)
    return way.project(normed[:, -keep:] if keep else normed)


def lean_states(
    decoder: Any,
    way: Way,
    tokens_BN: Tensor,
    mask: Masks | None,
    positions_BN: Tensor,
    held: Any,
    *,
    states: HiddenStates,
) -> Tensor:
    """What the output projection reads, [B, N, H]; `states` takes those that it was asked for.

    `held`: a KV cache; on a GPU whatever is `Held`.
    """
    hidden = decoder.embed_tokens(tokens_BN)
    way.begin(positions_BN, hidden, mask, held)
    out = behind = None
    for index, layer in enumerate(decoder.layers):
        in_front, behind_attention, in_between, behind_all = norms_of(layer)
        hidden, normed = way.enter(hidden, out, behind, in_front)
        states.take(index, hidden)
        out = way.attend(layer, index, normed)
        hidden, normed = way.enter(hidden, out, behind_attention, in_between)
        out, behind = way.feed_forward(layer, index, normed), behind_all
    hidden, normed = way.enter(hidden, out, behind, decoder.norm)
    states.take(UNNORMED, hidden)
    states.take(len(decoder.layers), normed)
    return normed
