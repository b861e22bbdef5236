"""The forward of Llama-like models on a CPU with less Python around the same operations.

In a call of a few milliseconds `transformers`' layers spend more time on the way to their matrix
products than beside them. Here the same modules run the same operations in the same order, without
the wrapping; every family is tested against its own `transformers` forward. Models of other
families, other precisions and other devices take their own forward. Read next: `backbone.py`.

Shapes: B rows, N new tokens, Q query heads, G key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import NAME
from .hidden_states import HiddenStates
from .kv_cache import KVCache

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def fits(model: nn.Module) -> bool:
    """Whether `lean_forward` computes what the model does: family, precision, no hooks."""
    plain: Any = model
    return (
        type(model).__name__ in FAMILIES
        and plain.dtype == torch.float32
        and plain.config._attn_implementation == NAME
        and not any(each._forward_hooks or each._forward_pre_hooks for each in _opened(plain))
    )


def _opened(model: Any) -> Iterator[nn.Module]:
    """The modules whose parts are run in their place; a hook of any other runs here as well."""
    yield from (model, model.model, model.model.norm)
    for layer in model.model.layers:
        yield from (layer, layer.self_attn, layer.mlp)
        yield from (layer.input_layernorm, layer.post_attention_layernorm)
        if hasattr(layer.self_attn, "q_norm"):
            yield from (layer.self_attn.q_norm, layer.self_attn.k_norm)


def lean_forward(
    model: Any,
    tokens_BN: Tensor,
    mask: Tensor | None,
    positions_BN: Tensor,
    kv_cache: KVCache,
    *,
    keep: int,
    states: HiddenStates,
) -> Tensor:
    """Logits [B, N, V] (of the last `keep` tokens if `keep` > 0) with the model's own modules.

    `states` takes the hidden states that it was asked for.
    """
    base = model.model
    hidden = base.embed_tokens(tokens_BN)
    cos, sin = (each[:, None] for each in base.rotary_emb(hidden, positions_BN))
    for index, layer in enumerate(base.layers):
        states.take(index, hidden)
        normed = _rms(hidden, layer.input_layernorm)
        hidden = hidden + _attend(layer.self_attn, normed, mask, cos, sin, kv_cache, index)
        normed = _rms(hidden, layer.post_attention_layernorm)
        mlp = layer.mlp
        inner = mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed)
        hidden = hidden + mlp.down_proj(inner)
    hidden = _rms(hidden, base.norm)
    states.take(len(base.layers), hidden)
    logits: Tensor = model.lm_head(hidden[:, -keep:] if keep else hidden)
    return logits


def _attend(
    attention: Any, hidden: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor, kv_cache: KVCache, index: int
) -> Tensor:
    B, N, _ = hidden.shape
    shape = (B, N, -1, attention.head_dim)
    query, key = attention.q_proj(hidden).view(shape), attention.k_proj(hidden).view(shape)
    value = attention.v_proj(hidden).view(shape).transpose(1, 2)
    if hasattr(attention, "q_norm"):
        query, key = _rms(query, attention.q_norm), _rms(key, attention.k_norm)
    query, key = _turned(query.transpose(1, 2), cos, sin), _turned(key.transpose(1, 2), cos, sin)
    keys, values = kv_cache.update(key, value, index)
    out = F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        scale=attention.scaling,
        enable_gqa=True,
        # without a mask: one token that sees all, or a prompt in an empty row
        is_causal=mask is None and N > 1,
    )
    out_BNH: Tensor = attention.o_proj(out.transpose(1, 2).reshape(B, N, -1))
    return out_BNH


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: halves turned against each other (Su et al. 2021)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), -1) * sin


def _rms(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)
