"""A quantised copy of the target as its draft: same layers, weights of 8 or 4 bits, by torchao.

Nothing is trained. The folder holds the settings: the copy is made from the target when it is
loaded, by rounding, which is the same every time. Embedding and norms are the target's own modules;
linear layers and the output projection are copies of fewer bits. Activations stay as they are.
Read next: `draft_model.py`, `early_exit.py`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.layers import assembled
from ...decoding.backbone.quantised import group_for, linear, quantisation_of, torchao_config
from ...errors import RequestError
from ..folder import read_settings, write_card, write_entry
from .draft_model import DraftModel

FAMILY = "quantised"


class Quantised(DraftModel):
    """Drafts with a copy of the target whose weights have fewer bits."""

    family = FAMILY


def quantised_copy(target: Backbone, *, bits: int, group_size: int | None) -> Backbone:
    """A copy of the target with weights of `bits` bits.

    Args:
        bits: 8 (one scale per output) or 4 (one scale per group of inputs).
        group_size: inputs that share a scale; of 4 bits alone.

    Raises:
        RequestError: the target's layers cannot be taken apart, or no group of that size fits.
        EnvironmentFailure: torchao is missing.
    """
    config = torchao_config(bits, group_size)
    found = quantisation_of(target.model.config)
    if found is not None:
        raise RequestError(
            f"the target is quantised itself ({found}): a copy of fewer bits is made of the unquantised model; take "
            "an early exit, or a draft of its own"
        )
    model: Any = target.model
    layers, head = copy.deepcopy(model.model.layers), copy.deepcopy(model.lm_head)
    made = assembled(model, list(layers), head, copy.deepcopy(model.config))
    if group_size is not None:
        _check_group_size(made, group_size)
    from torchao.quantization import quantize_

    quantize_(made, config)
    left = [name for name, each in linear(made) if type(each.weight) is nn.Parameter]
    if left:  # torchao passes over what it cannot do
        raise RequestError(
            f"torchao cannot quantise the layer {left[0]} to {bits} bits; take other bits, an early exit "
            "(`draftsmith derive early-exit`), or train a draft model"
        )
    return Backbone(made, name=target.name)


def save_quantised(folder: Path, target: Backbone, *, bits: int, group_size: int | None = None) -> DraftModel:
    """Write a drafter folder: which target, how many bits. The copy itself is handed back.

    Args:
        group_size: of 4 bits; default: the largest that fits.
    """
    if bits == 4 and group_size is None:
        group_size = group_for(target.model)
    draft = quantised_copy(target, bits=bits, group_size=group_size)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"bits": bits, "group_size": group_size}
    write_entry(folder, target, family=FAMILY, settings=settings)
    write_card(folder, target, f"The target with weights of {bits} bits, made from it when loaded.")
    return Quantised(draft, target.vocabulary)


def load_quantised(folder: Path, target: Backbone, **how: Any) -> Quantised:
    """Quantise the target anew as the folder says, `how` as of a `DraftModel`; errors as for `load_drafter`."""
    _, settings = read_settings(folder, target, FAMILY)
    bits, group_size = settings.get("bits", 0), settings.get("group_size")
    draft = quantised_copy(target, bits=bits, group_size=group_size)
    return Quantised(draft, target.vocabulary, **how)


def _check_group_size(model: nn.Module, group_size: int) -> None:
    for name, layer in linear(model):
        if layer.in_features % group_size:
            raise RequestError(
                f"a group of {group_size} does not divide the {layer.in_features} inputs of "
                f"{name}; leave the size out to take the largest that fits"
            )
