"""Rotary positions as the target has them: their angle, and how they are scaled to longer texts.

The frequencies of scaled positions are those of `transformers`' own functions (`ROPE_INIT_FUNCTIONS`: linear, dynamic,
yarn, longrope, llama3), so a drafter turns its heads as the target of the same config does, at every position that the
decoder reaches. A target that has other positions by kind of layer (Gemma 3) is followed in its full attention: a
drafter's layer sees the whole text. Heads of a drafter are turned whole, whatever part of its own the target turns.
Read next: `llama.py`, whose `Rotary` turns by these.

Shapes: D head size.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
PLAIN_THETA = 10_000.0
PLAIN = "default"
# how much of a head the target turns, and by which of several positions, is no scaling
_NOT_SCALING = ("rope_theta", "partial_rotary_factor", "mrope_section")
# yarn reads them in every release, and older ones do not list them
_YARN = ("truncate", "mscale", "mscale_all_dim")
_OF_CONTEXT = ("yarn", "longrope")
"""Kinds whose factor, where none is said, is the context over the original one."""


def rope_of(config: Any, head_size: int) -> tuple[float, dict[str, Any] | None]:
    """Theta of a target's full attention, and its scaling for heads of `head_size`; None where there is none.

    A scaling that cannot be followed is named in a warning; positions are plain ones then.

    Args:
        config: the target's `transformers` config, of the text alone.
    """
    rope = rope_words(config)
    theta = float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or PLAIN_THETA)
    scaling = scaling_in(rope, config)
    if scaling is None:
        return theta, None
    try:
        check_scaling(scaling, head_size, theta)
    except ValueError as error:
        _log.warning(
            "the target's rotary positions are of type %s, which its drafter does not follow (%s): it has plain ones, "
            "and drafts worse behind the texts that it is trained on",
            scaling["rope_type"],
            error,
        )
        return theta, None
    return theta, scaling


def rope_words(config: Any) -> dict[str, Any]:
    """The rotary parameters of a config's full attention, where it has some by kind of layer; of all layers else."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {kind: each for kind, each in rope.items() if isinstance(each, dict)}
    return dict(kinds.get("full_attention") or next(iter(kinds.values()), rope))


def check_scaling(scaling: Any, head_size: int, theta: float) -> None:
    """Raise ValueError for what no frequencies of heads of `head_size` can be made of."""
    if not isinstance(scaling, dict) or not isinstance(scaling.get("rope_type"), str):
        raise ValueError(f"rope_scaling is {scaling!r:.60}; expected null, or a table with a rope_type")
    from huggingface_hub.errors import StrictDataclassError

    try:
        made_D, factor = frequencies(head_size, theta, json.dumps(scaling, sort_keys=True), torch.device("cpu"))
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, StrictDataclassError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else f"{error!s:.200}"
        raise ValueError(f"rope_scaling of type {scaling['rope_type']!r:.40}: {reason}") from None
    if len(made_D) != head_size or not bool(made_D.isfinite().all()) or not factor > 0:
        raise ValueError(
            f"rope_scaling of type {scaling['rope_type']!r:.40} makes {len(made_D)} frequencies, times {factor}; "
            f"expected one for each of the {head_size} numbers of a head, and a factor above 0"
        )


@cache
def frequencies(head_size: int, theta: float, scaling: str, device: torch.device) -> tuple[Tensor, float]:
    """Of each number of a head, the same in both halves, [D], fp32; and what cosines and sines are multiplied by.

    Args:
        scaling: as JSON; empty where positions are plain, which are rounded as Llama's code rounds them.
    """
    if not scaling:
        step_D = torch.arange(0, head_size, 2, device=device).float()
        return (1.0 / theta ** (step_D / head_size)).repeat(2), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    words = json.loads(scaling)
    make = ROPE_INIT_FUNCTIONS[words["rope_type"]]
    # of a config of these positions alone; the context cancels out of all kinds, which name the original one
    context = round(words.get("factor", 1) * words.get("original_max_position_embeddings", 2048))
    config = LlamaConfig(
        hidden_size=head_size,
        num_attention_heads=1,
        head_dim=head_size,
        max_position_embeddings=context,
        rope_parameters={**words, "rope_theta": theta},
    )
    with torch.device("cpu"):  # whatever else is the default, as where shapes alone are made
        made, factor = make(config, torch.device("cpu"))
    return made.float().repeat(2).to(device), float(factor)


def scaling_in(rope: Mapping[str, Any], config: Any) -> dict[str, Any] | None:
    """The words of a scaling, each that another would be taken for among them; None for plain positions."""
    from transformers.modeling_rope_utils import RopeParameters

    kind = rope.get("rope_type") or rope.get("type") or PLAIN
    if kind == PLAIN:
        return None
    known = {*RopeParameters.__annotations__, *_YARN} - {*_NOT_SCALING}
    words = {name: value for name, value in sorted(rope.items()) if name in known and value is not None}
    words["rope_type"] = kind
    original: Any = words.get("original_max_position_embeddings")
    if kind in _OF_CONTEXT and type(original) in (int, float) and original > 0:
        words.setdefault("factor", config.max_position_embeddings / original)
    return words
