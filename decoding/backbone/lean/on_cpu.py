"""A layer on a CPU: cheaper kernels, and stacked projections where the model is frozen.

In fp32 a norm takes four kernels in place of seven; in bf16 every number is that of the model's own forward, to the
bit. Read next: `../stacked.py`.

Shapes: B rows, N new tokens, H hidden, Q query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import attend_by_groups, goes_by_groups
from ..kv_cache import KVCache
from ..stacked import Stack, Stacked
from ..windows import Masks


class OnCpu:
    """The steps of a layer of a plain model; see `forward.LayerRunner`."""

    def __init__(self, model: Any, stack: Stack | None) -> None:
        """`stack`: of this model, if its projections are stacked."""
        self._model, self._stack = model, stack

    def begin(self, positions_BN: Tensor, hidden_BNH: Tensor, mask: Masks | None, kv_cache: KVCache) -> None:
        self._turn = turn_of(*self._model.model.rotary_emb(hidden_BNH, positions_BN))
        assert not isinstance(mask, dict), "layers of a kind take one mask"
        if mask is not None:  # as numbers once: each layer's attention would make them of it
            mask = torch.zeros(mask.shape, dtype=hidden_BNH.dtype).masked_fill_(~mask, -torch.inf)
        self._mask, self._kv_cache = mask, kv_cache

    def enter(self, hidden: Tensor, out: Tensor | None, post_norm: Any, norm: Any) -> tuple[Tensor, Tensor]:
        if out is not None:
            hidden = hidden + out
        return hidden, _rms(hidden, norm)

    def attend(self, layer: Any, index: int, normed: Tensor) -> Tensor:
        attention, stacked = layer.self_attn, self._stacked(index)
        B, N, _ = normed.shape
        heads, value = (
            _separate_heads(attention, normed) if stacked is None else _fused_heads(attention, stacked, normed)
        )
        heads = turned(heads.transpose(1, 2), self._turn)
        G = value.shape[2]
        keys, values = self._kv_cache.update(heads[:, -G:], value.transpose(1, 2), index)
        out = self._attended(heads[:, :-G], keys, values, attention.scaling)
        project = attention.o_proj if stacked is None else stacked.out
        out_BNH: Tensor = project(out.transpose(1, 2).reshape(B, N, -1))
        return out_BNH

    def _attended(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if goes_by_groups(query, self._mask):
            return attend_by_groups(query, keys, values, self._mask, scale=scale)
        # without a mask: one token that sees all, or a prompt in an empty row
        causal = self._mask is None and query.shape[2] > 1
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=self._mask, scale=scale, enable_gqa=True, is_causal=causal
        )

    def feed_forward(self, layer: Any, index: int, normed: Tensor) -> Tensor:
        mlp, stacked = layer.mlp, self._stacked(index)
        if stacked is None:
            out: Tensor = mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))
            return out
        gate, up = stacked.gate_up(normed).chunk(2, -1)
        return stacked.down(mlp.act_fn(gate) * up)

    def project(self, hidden: Tensor) -> Tensor:
        logits: Tensor = (self._model.lm_head if self._stack is None else self._stack.head)(hidden)
        return logits

    def _stacked(self, index: int) -> Stacked | None:
        return None if self._stack is None else self._stack.layers[index]


def _fused_heads(attention: Any, stacked: Stacked, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key heads [B, N, Q + G, D] after their norms, and values [B, N, G, D], of one product."""
    B, N, _ = hidden.shape
    all_heads = stacked.query_key_value(hidden).view(B, N, -1, attention.head_dim)
    G = stacked.key_heads
    heads, value = all_heads[:, :, :-G], all_heads[:, :, -G:]
    if stacked.head_norm is not None:
        heads = rms_norm(heads, stacked.head_norm, attention.q_norm.variance_epsilon)
    return heads, value


def _separate_heads(attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """As `_fused_heads`, of three products."""
    B, N, _ = hidden.shape
    shape = (B, N, -1, attention.head_dim)
    query, key = attention.q_proj(hidden).view(shape), attention.k_proj(hidden).view(shape)
    if hasattr(attention, "q_norm"):
        query, key = _rms(query, attention.q_norm), _rms(key, attention.k_norm)
    return torch.cat((query, key), 2), attention.v_proj(hidden).view(shape)


def turn_of(cos_BND: Tensor, sin_BND: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines, and sines whose first half is negative, for all heads, [B, 1, N, D]."""
    half = sin_BND.shape[-1] // 2
    return cos_BND[:, None], torch.cat((-sin_BND[..., :half], sin_BND[..., half:]), -1)[:, None]


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding: halves turned against each other (Su et al. 2021)."""
    left, right = x.chunk(2, dim=-1)
    if x.dtype == torch.float32:
        return torch.addcmul(x * turn[0], torch.cat((right, left), -1), turn[1])
    # two roundings, as the model's own
    return (x * turn[0]).add_(torch.cat((right, left), -1).mul_(turn[1]))


def _rms(x: Tensor, norm: Any) -> Tensor:
    return rms_norm(x, norm.weight, norm.variance_epsilon)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight on a CPU, in fp32 as sqrt(n) x / hypot(|x|, sqrt(n eps)): fewer kernels.

    In half precision step by step as the model's own norm, so that no number is rounded otherwise.
    """
    if x.dtype != torch.float32:
        precise = x.float()
        scale = torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + eps)
        return precise.mul_(scale).to(x.dtype).mul_(weight)
    size = x.shape[-1]
    zero, least = _constants(size, eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcdiv(zero, x, torch.hypot(length, least), value=size**0.5).mul_(weight)


@cache
def _constants(size: int, eps: float) -> tuple[Tensor, Tensor]:
    """0 and sqrt(n eps), on the CPU in fp32."""
    return torch.zeros(()), torch.tensor((size * eps) ** 0.5)
