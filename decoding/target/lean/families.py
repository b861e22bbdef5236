"""Which models the lean forward computes, and what their layers differ in.

Every family is tested against its own `transformers` forward. Read next: `forward.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..attention import NAME
from ..cut import is_cut


@dataclass(frozen=True)
class Family:
    """A kind of decoder: attention and a feed-forward part, each behind a norm and added to what came in.

    Attributes:
        offset: what is added to the weight of every norm.
        sandwiched: whether what attention and feed-forward put out is normed before it is added.
        turned_by_kind: whether layers with a window have rotary frequencies of their own.
    """

    offset: float = 0.0
    sandwiched: bool = False
    turned_by_kind: bool = False


PLAIN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Equal layers, none of which depends on another: they can be taken apart as well (`../layers.py`)."""
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(PLAIN, Family()),
    # experts run as their own module
    "MixtralForCausalLM": Family(),
    "Qwen3MoeForCausalLM": Family(),
    "Gemma3ForCausalLM": Family(offset=1.0, sandwiched=True, turned_by_kind=True),
}


def misfit(model: Any) -> str | None:
    """Why a model takes its own forward, as the end of a sentence; None where the lean one computes what it does."""
    name = type(model).__name__
    if name not in FAMILIES:
        return f"layers of {name} are not known to it"
    if is_cut(model):
        return "the model lies over processes"
    if model.config._attn_implementation != NAME:
        return f"it attends by {model.config._attn_implementation}"
    if any(each._forward_hooks or each._forward_pre_hooks for each in _opened(model)):
        return "a hook looks at its layers"
    if model.device.type == "cpu":
        return _misfit_on_cpu(model, name)
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"its weights are in {model.dtype}"
    return None


def _misfit_on_cpu(model: Any, name: str) -> str | None:
    if name not in PLAIN:
        return f"layers of {name} are not known to it on a CPU"
    return None if model.dtype == torch.float32 else f"its weights are in {model.dtype}"


def _opened(model: Any) -> Iterator[nn.Module]:
    """The modules whose parts are run in their place; a hook of any other runs here as well."""
    yield from (model, model.model, model.model.norm)
    for layer in model.model.layers:
        yield from (layer, layer.self_attn, layer.mlp)
        yield from (each for each in norms_of(layer) if each is not None)
        if hasattr(layer.self_attn, "q_norm"):
            yield from (layer.self_attn.q_norm, layer.self_attn.k_norm)


def norms_of(layer: Any) -> tuple[Any, Any, Any, Any]:
    """The norms of a layer: in front of attention, behind it, in front of the feed-forward part, behind it."""
    if hasattr(layer, "pre_feedforward_layernorm"):
        return (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.pre_feedforward_layernorm,
            layer.post_feedforward_layernorm,
        )
    return layer.input_layernorm, None, layer.post_attention_layernorm, None


def eps_of(norm: Any) -> float:
    """What a norm adds to the mean square."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
