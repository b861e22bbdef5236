"""A trained model with more layers, whose output is at first the same.

Copies of a layer stand behind it, their two output projections zero: each begins as the identity of the
residual stream, and training turns it into a layer (block expansion, Wu et al. 2024, arXiv 2401.02415; growing
networks that keep their function, Chen et al. 2016, arXiv 1511.05641). A deeper model begins where the trained
one ended, which costs a fraction of training it from nothing. Read next: `architecture.py`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from ...decoding.backbone.layers import assembled, config_with_layers
from ...errors import RequestError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def deepened(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """`model` with `layers` layers: its own, and copies spread evenly behind them that add nothing yet.

    Raises:
        RequestError: it has as many already, or its layers cannot be taken apart.
    """
    base: Any = model.model
    own = len(base.layers)
    if layers <= own:
        raise RequestError(
            f"model.deepen_to is {layers}, and model.start_from has {own} layers already; give more, or leave it out"
        )
    order = sources(own, layers)
    made: list[Any] = [
        base.layers[source] if at == 0 or order[at - 1] != source else _silent(base.layers[source])
        for at, source in enumerate(order)
    ]
    for at, layer in enumerate(made):
        layer.self_attn.layer_idx = at
    return assembled(model, made, model.lm_head, config_with_layers(model.config, order))


def sources(own: int, layers: int) -> list[int]:
    """Which of `own` layers each of `layers` comes from: in order, each about equally often."""
    return [at * own // layers for at in range(layers)]


def _silent(layer: nn.Module) -> nn.Module:
    """A copy that adds nothing to the residual stream."""
    made: Any = copy.deepcopy(layer)
    with torch.no_grad():
        made.self_attn.o_proj.weight.zero_()
        made.mlp.down_proj.weight.zero_()
    return made
