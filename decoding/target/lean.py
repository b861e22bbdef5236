"""The forward of Llama-like models on a CPU with less Python around the same operations.

In a call of a few milliseconds `transformers`' layers spend more time on the way to their matrix
products than in them. Here the same weights compute the same numbers with fewer and cheaper operations: query and
key are turned together, a norm takes four kernels in place of seven, and small frozen models have their
projections stacked. Every family is tested against its own `transformers` forward. Models of other families,
other precisions and other devices take their own forward. Read next: `stacked.py`; `backbone.py`.

Shapes: B rows, N new tokens, H hidden, Q query heads, G key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import NAME
from .hidden_states import UNNORMED, HiddenStates
from .kv_cache import KVCache
from .stacked import Stack, Stacked

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
    stack: Stack | None = None,
) -> Tensor:
    """Logits [B, N, V] (of the last `keep` tokens if `keep` > 0) with the model's own weights.

    Args:
        states: takes the hidden states that it was asked for.
        stack: of this model, if its projections are stacked.
    """
    base = model.model
    hidden = base.embed_tokens(tokens_BN)
    turn = _turn(*base.rotary_emb(hidden, positions_BN))
    if mask is not None:  # as numbers once: each layer's attention would make them of it
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    for index, layer in enumerate(base.layers):
        states.take(index, hidden)
        stacked = None if stack is None else stack.layers[index]
        normed = _rms(hidden, layer.input_layernorm)
        hidden = hidden + _attend(layer.self_attn, stacked, normed, mask, turn, kv_cache, index)
        normed = _rms(hidden, layer.post_attention_layernorm)
        hidden = hidden + _feed_forward(layer.mlp, stacked, normed)
    states.take(UNNORMED, hidden)
    hidden = _rms(hidden, base.norm)
    states.take(len(base.layers), hidden)
    head = model.lm_head if stack is None else stack.head
    logits: Tensor = head(hidden[:, -keep:] if keep else hidden)
    return logits


def _attend(
    attention: Any,
    stacked: Stacked | None,
    hidden: Tensor,
    mask: Tensor | None,
    turn: tuple[Tensor, Tensor],
    kv_cache: KVCache,
    index: int,
) -> Tensor:
    B, N, _ = hidden.shape
    heads, value = _separate(attention, hidden) if stacked is None else _together(attention, stacked, hidden)
    heads = _turned(heads.transpose(1, 2), turn)
    G = value.shape[2]
    keys, values = kv_cache.update(heads[:, -G:], value.transpose(1, 2), index)
    out = F.scaled_dot_product_attention(
        heads[:, :-G],
        keys,
        values,
        attn_mask=mask,
        scale=attention.scaling,
        enable_gqa=True,
        # without a mask: one token that sees all, or a prompt in an empty row
        is_causal=mask is None and N > 1,
    )
    project = attention.o_proj if stacked is None else stacked.out
    out_BNH: Tensor = project(out.transpose(1, 2).reshape(B, N, -1))
    return out_BNH


def _together(attention: Any, stacked: Stacked, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key heads [B, N, Q + G, D] after their norms, and values [B, N, G, D], of one product."""
    B, N, _ = hidden.shape
    all_heads = stacked.query_key_value(hidden).view(B, N, -1, attention.head_dim)
    G = stacked.key_heads
    heads, value = all_heads[:, :, :-G], all_heads[:, :, -G:]
    if stacked.head_norm is not None:
        heads = rms_norm(heads, stacked.head_norm, attention.q_norm.variance_epsilon)
    return heads, value


def _separate(attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """As `_together`, of three products."""
    B, N, _ = hidden.shape
    shape = (B, N, -1, attention.head_dim)
    query, key = attention.q_proj(hidden).view(shape), attention.k_proj(hidden).view(shape)
    if hasattr(attention, "q_norm"):
        query, key = _rms(query, attention.q_norm), _rms(key, attention.k_norm)
    return torch.cat((query, key), 2), attention.v_proj(hidden).view(shape)


def _feed_forward(mlp: Any, stacked: Stacked | None, normed: Tensor) -> Tensor:
    if stacked is None:
        out: Tensor = mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        return out
    gate, up = stacked.gate_up(normed).chunk(2, -1)
    return stacked.down(mlp.act_fn(gate) * up)


def _turn(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines, and sines whose first half is negative, for all heads, [B, 1, N, D]."""
    half = sin.shape[-1] // 2
    return cos[:, None], torch.cat((-sin[..., :half], sin[..., half:]), -1)[:, None]


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding: halves turned against each other (Su et al. 2021)."""
    left, right = x.chunk(2, dim=-1)
    return torch.addcmul(x * turn[0], torch.cat((right, left), -1), turn[1])


def _rms(x: Tensor, norm: Any) -> Tensor:
    return rms_norm(x, norm.weight, norm.variance_epsilon)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, as sqrt(n) x / hypot(|x|, sqrt(n eps)), which takes fewer kernels.

    On a CPU in fp32.
    """
    size = x.shape[-1]
    zero, least = _constants(size, eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcdiv(zero, x, torch.hypot(length, least), value=size**0.5).mul_(weight)


@cache
def _constants(size: int, eps: float) -> tuple[Tensor, Tensor]:
    """0 and sqrt(n eps), on the CPU in fp32."""
    return torch.zeros(()), torch.tensor((size * eps) ** 0.5)
