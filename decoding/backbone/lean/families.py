"""Which models the lean forward computes, and how their layers differ.

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
class DecoderFamily:
    """A kind of decoder: attention and a feed-forward part, each after a norm and added to its input.

    Attributes:
        from_one: whether the weight of a norm is its difference from one.
        turned_by_kind: whether layers with a window have rotary frequencies of their own.
    """

    from_one: bool = False
    turned_by_kind: bool = False


PLAIN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Equal layers, none of which depends on another: they can be taken apart as well (`../layers.py`)."""
FAMILIES: dict[str, DecoderFamily] = {
    # decoder: its family
    "LlamaModel": DecoderFamily(),
    "MistralModel": DecoderFamily(),
    "Qwen2Model": DecoderFamily(),
    "Qwen3Model": DecoderFamily(),
    # experts run as their own module
    "MixtralModel": DecoderFamily(),
    "Qwen3MoeModel": DecoderFamily(),
    "Gemma3TextModel": DecoderFamily(from_one=True, turned_by_kind=True),
}
_HALVES = (torch.bfloat16, torch.float16)


def misfit(model: Any) -> str | None:
    """Why a causal LM takes its own forward, as the end of a sentence; None where the lean one does as well."""
    name = type(model).__name__
    known = {f"{decoder.removesuffix('Model').removesuffix('Text')}ForCausalLM" for decoder in FAMILIES}
    if name not in known:
        return f"layers of {name} are not known to it"
    if model._forward_hooks or model._forward_pre_hooks:
        return "a hook looks at it"
    if model.device.type == "cpu":
        return _misfit_on_cpu(model, name) or _misfit_anywhere(model.model)
    if model.config._attn_implementation != NAME:
        return f"it attends by {model.config._attn_implementation}"
    return misfit_on_gpu(model.model)


def misfit_on_gpu(decoder: Any) -> str | None:
    """The same for a decoder on a GPU."""
    if type(decoder).__name__ not in FAMILIES:
        return f"layers of {type(decoder).__name__} are not known to it"
    if decoder.dtype not in _HALVES:
        return f"its weights are in {decoder.dtype}"
    if decoder.config._attn_implementation not in (NAME, "sdpa"):
        return f"it attends by {decoder.config._attn_implementation}"
    return _misfit_anywhere(decoder)


def _misfit_on_cpu(model: Any, name: str) -> str | None:
    if name not in PLAIN:
        return f"layers of {name} are not known to it on a CPU"
    if model.config._attn_implementation != NAME:
        return f"it attends by {model.config._attn_implementation}"
    return None if model.dtype in (torch.float32, torch.bfloat16) else f"its weights are in {model.dtype}"


def _misfit_anywhere(decoder: Any) -> str | None:
    if is_cut(decoder):
        return "the model lies over processes"
    if getattr(decoder.config, "attn_logit_softcapping", None) is not None:
        return "its scores are capped"
    if getattr(decoder.config, "final_logit_softcapping", None) is not None:
        return "its logits are capped"
    if getattr(decoder.config, "use_bidirectional_attention", False):
        return "it attends to what comes later"
    if any(each._forward_hooks or each._forward_pre_hooks for each in _opened(decoder)):
        return "a hook looks at its layers"
    return None


def _opened(decoder: Any) -> Iterator[nn.Module]:
    """The modules whose parts are run in their place; a hook of any other runs here as well."""
    yield from (decoder, decoder.norm)
    for layer in decoder.layers:
        yield from (layer, layer.self_attn, layer.mlp)
        yield from (each for each in norms_of(layer) if each is not None)
        if hasattr(layer.self_attn, "q_norm"):
            yield from (layer.self_attn.q_norm, layer.self_attn.k_norm)


def norms_of(layer: Any) -> tuple[Any, Any, Any, Any]:
    """The norms of a layer: before and after attention, before and after the feed-forward part."""
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
