"""A quantised copy of the target as its draft: same layers, weights of 8 or 4 bits, by torchao.

Nothing is trained. The folder holds the settings: the copy is made from the target when it is
loaded, by rounding, which is the same every time. Embedding and norms are the target's own modules;
linear layers and the output projection are copies of fewer bits. Activations stay as they are.
Read next: `draft_model.py`, `early_exit.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...decoding.target.backbone import Backbone
from ...decoding.target.layers import assembled
from ...errors import EnvironmentFailure, RequestError
from ..folder import read_settings, write_card, write_entry
from .draft_model import DraftModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILY = "quantised"
GROUPS = (128, 64, 32, 16)


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
    config = _torchao_config(bits, group_size)
    model: Any = target.model
    layers, head = copy.deepcopy(model.model.layers), copy.deepcopy(model.lm_head)
    made = assembled(model, list(layers), head, copy.deepcopy(model.config))
    if group_size is not None:
        _check_group_size(made, group_size)
    from torchao.quantization import quantize_

    quantize_(made, config)
    left = [name for name, each in _linear(made) if type(each.weight) is nn.Parameter]
    if left:  # torchao passes over what it cannot do
        raise RequestError(f"torchao cannot quantise the layer {left[0]} to {bits} bits")
    return Backbone(made, name=target.name)


def group_for(model: PreTrainedModel) -> int:
    """The largest usual group that divides the inputs of every linear layer.

    Raises:
        RequestError: there is none.
    """
    common = math.gcd(*(each.in_features for _, each in _linear(model)))
    group = next((size for size in GROUPS if common % size == 0), None)
    if group is None:
        raise RequestError(
            f"the target's linear layers have {common} as the largest common divisor of their "
            f"inputs; 4 bits need groups of {', '.join(map(str, GROUPS))}: take 8 bits"
        )
    return group


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


def _torchao_config(bits: int, group_size: int | None) -> Any:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
    except ImportError as error:
        raise EnvironmentFailure(
            f"a quantised draft needs torchao, which cannot be imported here ({error}): "
            "pip install 'draftsmith[quant]'"
        ) from error
    if bits == 8 and group_size is None:
        return Int8WeightOnlyConfig()
    if bits == 4 and isinstance(group_size, int) and group_size > 0:
        # of torchao's layouts the one that every device reads: a byte holds one weight of 4 bits
        four: Any = torch.int4  # type: ignore[attr-defined]
        return IntxWeightOnlyConfig(weight_dtype=four, granularity=PerGroup(group_size))
    raise RequestError(
        f"a quantised draft of {bits} bits with groups of {group_size}; expected 8 bits without groups, or 4 with"
    )


def _check_group_size(model: nn.Module, group_size: int) -> None:
    for name, layer in _linear(model):
        if layer.in_features % group_size:
            raise RequestError(
                f"a group of {group_size} does not divide the {layer.in_features} inputs of "
                f"{name}; leave the size out to take the largest that fits"
            )


def _linear(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear))
