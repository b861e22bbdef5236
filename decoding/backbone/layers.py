"""A model with fewer of its own layers: a view, no weight is copied.

An early exit drafts with such a view, and the search for the layers of a pruned draft measures them.
For plain decoders only: embedding, equal layers, one last norm, one output projection.
Read next: `drafters/model/early_exit.py`, `trainers/pruning/layers.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import RequestError
from .cut import is_cut
from .lean.families import PLAIN

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def check_layer_family(name: str, what: str) -> None:
    """Raise RequestError where a model of that class is not known to be layers and nothing else.

    Args:
        name: of the class, as in Qwen3ForCausalLM.
        what: what was to be done with it, for the message.
    """
    if name not in PLAIN:
        raise RequestError(
            f"cannot {what} a target of class {name}: its layers may depend on each other; "
            f"expected one of {', '.join(PLAIN)}. Train a draft of its own in place of it"
        )


def config_with_layers(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """A copy of a config for the layers that are named, in their order."""
    cut: Any = copy.deepcopy(config)
    types = getattr(cut, "layer_types", None)
    cut.num_hidden_layers = len(layers)
    if types is not None:
        cut.layer_types = [types[layer] for layer in layers]
    return cut


def with_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A view of `model` that has only the layers named (counted from 0), in their order.

    Raises:
        RequestError: the model's layers cannot be taken apart.
    """
    kept = [model.model.layers[layer] for layer in layers]
    return assembled(model, kept, model.lm_head, config_with_layers(model.config, layers))


def assembled(
    model: PreTrainedModel, layers: Sequence[nn.Module], head: nn.Module, config: PretrainedConfig
) -> PreTrainedModel:
    """A model of `layers` and `head` between the embedding and the last norm of `model`.

    Raises:
        RequestError: as for `with_layers`; or its layers lie over processes.
    """
    if is_cut(model):
        raise RequestError(
            "the target lies over several processes, and its layers cannot be taken apart there; take a whole one "
            "(--target.tensor_parallel 1, --target.sharding none)"
        )
    check_layer_family(type(model).__name__, "take apart the layers of")
    empty = copy.deepcopy(config)
    empty.num_hidden_layers = 0  # layers that would be thrown away take most of the time
    with torch.device("meta"):
        made: Any = type(model)(empty)
    base = made.model
    made.config = base.config = config
    base.embed_tokens, base.norm = model.model.embed_tokens, model.model.norm
    base.layers, made.lm_head = nn.ModuleList(layers), head
    # rotary frequencies of some kinds follow the text's length, so two readers cannot share them
    base.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    made.generation_config = model.generation_config
    made.train(model.training)
    return made
