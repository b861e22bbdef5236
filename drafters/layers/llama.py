"""What the networks of several families are made of: Llama's parts, with a KV cache or without.

Written out here, because attention reads twice the width in one of them and looks at keys of its
own in training. Tensors have the names that serving engines load. Read next: `../eagle/net.py`, the smallest of them;
`../block/net.py` and `../mtp/layers.py`, others.

Shapes: B rows, N pairs (a hidden state and the embedding of the token after it), H hidden size,
X width of what attention reads, Q query heads, G key-value heads, T keys in view, D head size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...decoding.backbone.attention import attend_by_groups, goes_by_groups
from ...decoding.backbone.kv_cache import KVCache
from ...decoding.backbone.lean.on_cpu import rms_norm
from ...decoding.backbone.stacked import SharedInputLinears
from ..sizes import check_number, check_sizes
from .rope import check_scaling, frequencies, rope_of


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a network: what `config.json` of a drafter folder holds as its settings."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    rope_theta: float
    eps: float
    rope_scaling: dict[str, Any] | None = field(default=None, kw_only=True)
    """How rotary positions are scaled, in the words of `transformers`; None: not at all, as in older folders."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no layer can have."""
        whole = ("hidden", "intermediate", "heads", "kv_heads", "head_size")
        check_sizes(**{name: getattr(self, name) for name in whole})
        check_number(0, rope_theta=self.rope_theta, eps=self.eps)
        if self.heads % self.kv_heads or self.head_size % 2 or not self.rope_theta:
            raise ValueError(
                f"heads {self.heads}, kv_heads {self.kv_heads}, head_size {self.head_size}, rope_theta "
                f"{self.rope_theta}; expected a multiple of kv_heads, an even size, and an angle above 0"
            )
        if self.rope_scaling is not None:
            check_scaling(self.rope_scaling, self._turned, self.rope_theta)

    @property
    def _turned(self) -> int:
        """Numbers of a head that are turned to its position."""
        return self.head_size

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """The sizes that a drafter folder's `config.json` holds."""
        return cls(**settings)

    @classmethod
    def of(cls, config: Any, **chosen: Any) -> Self:
        """The sizes of a target's `transformers` config, and what is chosen: the fields that a subclass adds."""
        return cls(**sizes_like(config), **chosen)


def sizes_like(config: Any) -> dict[str, Any]:
    """The fields of `LayerShape`, read from a target's `transformers` config."""
    config = config.get_text_config(decoder=True)
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    head_size = int(getattr(config, "head_dim", None) or hidden // heads)
    theta, scaling = rope_of(config, head_size)
    # families without gated layers name their sizes otherwise: Llama's usual proportions then
    return {
        "hidden": hidden,
        "intermediate": int(getattr(config, "intermediate_size", 0) or 32 * (hidden // 12)),
        "heads": heads,
        "kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_size": head_size,
        "rope_theta": theta,
        "eps": float(getattr(config, "rms_norm_eps", 1e-5)),
        "rope_scaling": scaling,
    }


def embedding_spread(target: nn.Module) -> Tensor:
    """How loud a token's embedding is, as the target's layers read it: the standard deviation of its numbers, fp32."""
    model: Any = target
    embedding = model.get_input_embeddings()
    # Gemma's embedding multiplies its rows
    return embedding.weight.float().std() * getattr(embedding, "scalar_embed_scale", 1.0)


class Projected(NamedTuple):
    """Queries, keys and values of some pairs, turned to their positions."""

    query_BQND: Tensor
    key_BGND: Tensor
    value_BGND: Tensor


class Attention(nn.Module):
    """Llama's grouped attention without biases; what it reads may be wider than what it writes."""

    def __init__(self, shape: LayerShape, width: int, *, query_norm: bool = False) -> None:
        """`query_norm`: a norm on every query and key head, before they are turned, as Qwen3's layers have."""
        super().__init__()
        self.head_size, self.group = shape.head_size, shape.heads // shape.kv_heads
        self.q_proj = nn.Linear(width, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)
        self._query_key_value = SharedInputLinears(self, "q_proj", "k_proj", "v_proj")
        self._out = SharedInputLinears(self, "o_proj")
        self.q_norm = Norm(shape.head_size, shape.eps) if query_norm else None
        self.k_norm = Norm(shape.head_size, shape.eps) if query_norm else None

    def forward(
        self, x_BNX: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, kv_cache: KVCache | None, layer: int = 0
    ) -> Tensor:
        """Attention output [B, N, H]; with a KV cache over all that its rows hold of layer `layer`."""
        query, key, value = self.project(x_BNX, turn)
        if kv_cache is not None:
            key, value = kv_cache.update(key, value, layer)
        return self.joined(attend(query, key, value, mask, self.group), x_BNX)

    def project(self, x_BNX: Tensor, turn: tuple[Tensor, Tensor]) -> Projected:
        """Queries, keys and values; `turn` is what `Rotary` gives for the positions."""
        if self.q_norm is not None:
            return self._by_heads(x_BNX, turn)
        shape = (*x_BNX.shape[:2], -1, self.head_size)
        joined = self._query_key_value.joined(x_BNX)
        if joined is not None:  # in one row: queries and keys are turned together
            heads, G = joined.view(shape).transpose(1, 2), self.k_proj.out_features // self.head_size
            both = turned(heads[:, :-G], turn)
            return Projected(both[:, :-G], both[:, -G:], heads[:, -G:])
        query, key, value = (each.view(shape).transpose(1, 2) for each in self._query_key_value.apart(x_BNX))
        if _is_decoding_on_gpu(x_BNX):
            both = _turned_at_once(torch.cat((query, key), 1), turn)
            G = key.shape[1]
            return Projected(both[:, :-G], both[:, -G:], value)
        return Projected(turned(query, turn), turned(key, turn), value)

    def _by_heads(self, x_BNX: Tensor, turn: tuple[Tensor, Tensor]) -> Projected:
        """As `project`: queries and keys normed, where there are norms, before they are turned."""
        shape = (*x_BNX.shape[:2], -1, self.head_size)
        query, key, value = (each.view(shape) for each in self._query_key_value(x_BNX))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return Projected(
            self._turned(query.transpose(1, 2), turn), self._turned(key.transpose(1, 2), turn), value.transpose(1, 2)
        )

    def _turned(self, x_BGND: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        return turned(x_BGND, turn)

    def joined(self, out_BQND: Tensor, read_BNX: Tensor | None = None) -> Tensor:
        """The heads' outputs side by side, projected to [B, N, H]; a gate would read `x_BNX` of `project` again."""
        (out_BNH,) = self._out(out_BQND.transpose(1, 2).flatten(2))
        return out_BNH


def attend(
    query_BQND: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    mask: Tensor | None,
    group: int,
    *,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention [B, Q, N, D]; without a mask causal, or one token sees all."""
    shared_on_gpu = mask is not None and group > 1 and _is_decoding_on_gpu(query_BQND)
    if shared_on_gpu or goes_by_groups(query_BQND, mask):
        return attend_by_groups(query_BQND, key_BGTD, value_BGTD, mask, scale=scale)
    # on a GPU those kernels know of shared heads that read no mask, in half precision
    flash = mask is None and query_BQND.dtype != torch.float32 and _is_decoding_on_gpu(query_BQND)
    grouped = flash or query_BQND.device.type == "cpu"
    if not grouped and group > 1:
        key_BGTD = key_BGTD.repeat_interleave(group, 1)
        value_BGTD = value_BGTD.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(
        query_BQND,
        key_BGTD,
        value_BGTD,
        attn_mask=mask,
        enable_gqa=grouped,
        scale=scale,
        is_causal=mask is None and query_BQND.shape[2] > 1,
    )


class Rotary(nn.Module):
    """Cosines and sines of rotary positions (Su et al. 2021).

    Frequencies are no buffer: it would be rounded with the weights, and half precision is off by whole turns at a
    position of some hundreds.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.follow(shape)

    def follow(self, shape: LayerShape) -> None:
        """Turn by the angles of that shape from now on."""
        self.theta = shape.rope_theta
        self.scaling = "" if shape.rope_scaling is None else json.dumps(shape.rope_scaling, sort_keys=True)

    def forward(self, positions_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Each [B, 1, N, D], fp32."""
        frequency_D, factor = frequencies(self.head_size, self.theta, self.scaling, positions_BN.device)
        angle_BND = positions_BN[:, None, :, None] * frequency_D
        if factor == 1.0:
            return angle_BND.cos(), angle_BND.sin()
        return angle_BND.cos() * factor, angle_BND.sin() * factor


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Halves turned against each other, as Llama does; in fp32, back in the input's type."""
    left, right = x.chunk(2, dim=-1)
    return (x * turn[0] + torch.cat((-right, left), -1) * turn[1]).to(x.dtype)


def _turned_at_once(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """`turned` in fewer launches, its sum rounded once: where its last bit is nobody's gradient."""
    left, right = x.chunk(2, dim=-1)
    sin_left, sin_right = turn[1].chunk(2, dim=-1)
    signed = torch.cat((-sin_left, sin_right), -1)
    return torch.addcmul(x * turn[0], torch.cat((right, left), -1), signed).to(x.dtype)


def _is_decoding_on_gpu(x: Tensor) -> bool:
    """Whether launches are what a call's time is: without gradients, on CUDA."""
    return x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


class Norm(nn.Module):
    """Llama's RMS norm, computed in fp32 whatever the precision around it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        plain = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if plain and x.device.type == "cpu" and x.dtype == self.weight.dtype == torch.float32:
            return rms_norm(x, self.weight, self.eps)
        if x.dtype == self.weight.dtype and _is_decoding_on_gpu(x):  # one kernel, which computes in fp32
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """Llama's gated feed-forward part."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)
        self._gate_up, self._down = (
            SharedInputLinears(self, "gate_proj", "up_proj"),
            SharedInputLinears(self, "down_proj"),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x)
        gated: Tensor = _Gated.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate) * up
        (out,) = self._down(gated)
        return out


class _Gated(torch.autograd.Function):
    """silu(gate) up; of its numbers the backward pass makes silu(gate) again, which is a quarter less to keep."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (gate, up) = grads, ctx.saved_tensors
        made: Tensor = torch.ops.aten.silu_backward(grad * up, gate)
        return made, grad * F.silu(gate)
