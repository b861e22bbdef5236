"""Llama 4's temperature of attention, by positions.

Its layers without rotary positions multiply each query by a factor that grows with the token's place in the text. Its
own code counts slots of the KV cache instead, which are not places in the text under a tree, in rows of different
lengths and in packed rows. Here the factor follows the positions that the decoder layer is given: the layer's own
factor is switched off, and the projection of the queries is multiplied. Where slots are positions the two agree.
Read next: `backbone.py`.

Shapes: B rows, N tokens, F numbers of the queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Temperature:
    """Two hooks of a layer: one sees the positions, the other multiplies the queries."""

    def __init__(self, attention: Any) -> None:
        self._every, self._scale = float(attention.floor_scale), float(attention.attn_scale)
        self._positions_BN: Tensor | None = None

    def see(self, _layer: nn.Module, _given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before the decoder layer."""
        self._positions_BN = named["position_ids"]

    def multiply(self, _projection: nn.Module, _given: tuple[Any, ...], queries_BNF: Tensor) -> Tensor:
        """After the projection; in fp32, as the model does it."""
        if self._positions_BN is None:
            raise RuntimeError(
                "a layer of Llama 4 is called without its decoder layer, and nobody knows the positions"
            )
        floors_BN = torch.floor((self._positions_BN.float() + 1.0) / self._every)
        factor_BN = torch.log1p(floors_BN) * self._scale + 1.0
        return (queries_BNF * factor_BN[..., None]).to(queries_BNF.dtype)


def use_positions(model: nn.Module) -> None:
    """Let every layer of a model that tunes its temperature do so by positions; others stay as they are."""
    for layer in list(model.modules()):
        attention: Any = getattr(layer, "self_attn", None)
        if not getattr(attention, "attn_temperature_tuning", False) or attention.use_rope:
            continue
        temperature = _Temperature(attention)
        layer.register_forward_pre_hook(temperature.see, with_kwargs=True)
        attention.q_proj.register_forward_hook(temperature.multiply)
        attention.attn_temperature_tuning = False  # the config's stays, so that a saved model is what it was
