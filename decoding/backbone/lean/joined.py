"""Projections with one input, side by side in memory: one product for query, key and value, one for gate and up.

No weight is held twice. The parameters of the layers become views of the joined weight, so whatever else reads them,
`transformers`' own forward above all, finds the same numbers. They are moved once; a later caller finds them side by
side. A CUDA graph that was recorded before the move reads where they no longer are. Read next:
`on_cuda.py`.

Shapes: H hidden, O numbers put out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..stacked import is_plain


class Product(NamedTuple):
    """Several linear layers as one."""

    weight: Tensor
    """[O, H]."""
    bias: Tensor | None


class JoinedLayer(NamedTuple):
    """A layer's products that share their input."""

    query_key_value: Product
    gate_up: Product | None
    """None where the feed-forward part is not two projections of the same input, as one of experts."""


class JoinedDecoder:
    """The joined layers of a decoder, as long as its weights stay where they are."""

    def __init__(self, decoder: Any) -> None:
        """Move the weights together, layer by layer."""
        self.layers, self._held = [], []
        for layer in decoder.layers:
            attention, mlp = layer.self_attn, layer.mlp
            parts = [[attention.q_proj, attention.k_proj, attention.v_proj]]
            if is_gated(mlp):
                parts.append([mlp.gate_proj, mlp.up_proj])
            products = [_moved_together(part) for part in parts]
            self._held += [each for part in parts for linear in part for each in linear.parameters()]
            self.layers.append(JoinedLayer(products[0], products[1] if len(products) > 1 else None))
        self._places = self._now()

    @property
    def is_current(self) -> bool:
        """Whether no weight has been moved since. A weight that is written to is written to here as well."""
        return self._now() == self._places

    def _now(self) -> list[int]:
        return [each.data_ptr() for each in self._held]


def can_join(decoder: Any) -> bool:
    """Whether a decoder's projections are plain frozen linear layers, whose inputs and outputs nobody looks at."""
    return all(
        is_plain(each)
        for layer in decoder.layers
        for part, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj")))
        if part is layer.self_attn or is_gated(part)
        for each in (getattr(part, name) for name in names)
    )


def is_gated(mlp: nn.Module) -> bool:
    """Whether a feed-forward part is a gate, what it lets through, and a projection of both."""
    return hasattr(mlp, "gate_proj") and hasattr(mlp, "up_proj")


def _moved_together(linears: Sequence[nn.Linear]) -> Product:
    """The layers as one; their own weights are views of it from then on."""
    biases = [each.bias for each in linears if each.bias is not None]
    return Product(_as_one([each.weight for each in linears]), _as_one(biases) if biases else None)


# decoding runs where nothing has a gradient, ever; a model that is decoded with may be trained beside later on
@torch.inference_mode(False)
@torch.no_grad()
def _as_one(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of parameters of equal rows, one after the other; they become views of it."""
    first, rows = parts[0], sum(map(len, parts))
    shape = (rows, *first.shape[1:])
    if all(_follows(after, before) for before, after in pairwise(parts)):
        whole = first.detach().new_empty(0)
        return whole.set_(first.untyped_storage(), first.storage_offset(), shape, first.stride())
    whole = torch.cat([each.detach() for each in parts])
    for each, view in zip(parts, whole.split([len(each) for each in parts]), strict=True):
        each.data = view
    return whole


def _follows(after: Tensor, before: Tensor) -> bool:
    """Whether a tensor lies right after another one, in the same memory."""
    return (
        after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and after.storage_offset() == before.storage_offset() + before.numel()
        and after.is_contiguous()
        and before.is_contiguous()
    )
