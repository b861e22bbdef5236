"""A layer on a GPU in bf16 or fp16: one launch for what stands between two matrix products.

A replayed call of a few tokens is a chain of kernels, each of which waits for the one before, so its time depends on
the bytes of the weights and on the number of kernels. Here a layer is four products, the attention, and as few
others as possible. `TorchKernels` is torch alone and the definition; Triton's kernels
(`../../kernels/layer.py`) are tested against it. Read next: `forward.py`; `joined.py`, the weights side by side.

Shapes: B rows, N new tokens, T slots in view, H hidden, Q query heads, G key-value heads, D head size, I inner size.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import kernels
from ..hidden_states import HiddenStates
from ..stacked import is_bare
from ..windows import Masks
from .families import FAMILIES, eps_of
from .forward import KeyValueSlots, lean_states
from .joined import JoinedDecoder, JoinedLayer, can_join
from .on_cpu import turn_of, turned

SILU, TANH = ("SiLU", "SiLUActivation"), ("GELUTanh", "PytorchGELUTanh")


class LayerKernels(Protocol):
    """What stands between products, as functions of tensors."""

    def enter(
        self,
        hidden: Tensor,
        out: Tensor | None,
        post_norm: Tensor | None,
        weight: Tensor,
        eps: float,
        *,
        from_one: bool,
    ) -> tuple[Tensor, Tensor]:
        """`hidden + norm(out)` and its norm, [B, N, H]; without `post_norm` `out` is added as it is."""

    def place_heads(
        self,
        joined: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        turn: tuple[Tensor, Tensor],
        stores: tuple[Tensor, Tensor],
        slots_BN: Tensor,
        eps: float,
        *,
        from_one: bool,
    ) -> Tensor:
        """Norm and turn heads, write keys and values to their slots; queries [B, Q, N, D]."""

    def gated(self, gate_up: Tensor, *, by_tanh: bool) -> Tensor:
        """`act(gate) * up`, [..., I]."""

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, slots: int, scale: float
    ) -> Tensor:
        """What heads put out, side by side, [B, N, Q D]."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`, [..., O]."""


class OnCuda:
    """The steps of a layer; see `forward.LayerRunner`."""

    def __init__(
        self,
        decoder: Any,
        joined: JoinedDecoder | None,
        head: nn.Module | None = None,
        steps: LayerKernels | None = None,
    ) -> None:
        """`joined`: the weights that are read together, if they lie side by side; `head`: the output projection."""
        family = FAMILIES[type(decoder).__name__]
        self._decoder, self._joined, self._head = decoder, joined, head
        self._from_one, self._by_kind = family.from_one, family.turned_by_kind
        self._types = getattr(decoder.config, "layer_types", None)
        self._steps: LayerKernels = steps or _steps()

    def begin(self, positions_BN: Tensor, hidden_BNH: Tensor, mask: Masks | None, kv_cache: KeyValueSlots) -> None:
        rotary = self._decoder.rotary_emb
        kinds = set(self._types) if self._by_kind and self._types else {None}
        self._turns = {kind: rotary(hidden_BNH, positions_BN, *([] if kind is None else [kind])) for kind in kinds}
        self._masks, self._kv_cache = mask, kv_cache

    def enter(self, hidden: Tensor, out: Tensor | None, post_norm: Any, norm: Any) -> tuple[Tensor, Tensor]:
        weight = None if post_norm is None else post_norm.weight
        return self._steps.enter(hidden, out, weight, norm.weight, eps_of(norm), from_one=self._from_one)

    def attend(self, layer: Any, index: int, normed: Tensor) -> Tensor:
        attention, kv_cache = layer.self_attn, self._kv_cache
        kind = self._types[index] if self._types else None
        heads = self._heads(attention, index, normed)
        B, N, _ = normed.shape
        stores = kv_cache.stores(index, heads.view(B, N, -1, attention.head_dim)[:, :, -_groups(attention) :])
        norms, eps = None, 0.0
        if hasattr(attention, "q_norm"):
            norms, eps = (attention.q_norm.weight, attention.k_norm.weight), eps_of(attention.q_norm)
        turn = self._turns[kind if self._by_kind else None]
        slots_BN = kv_cache.slots_of(normed.device)
        query = self._steps.place_heads(heads, norms, turn, stores, slots_BN, eps, from_one=self._from_one)
        mask = self._masks[str(kind)] if isinstance(self._masks, dict) else self._masks
        out = self._steps.attend(query, *stores, mask, kv_cache.get_mask_sizes(N)[0], attention.scaling)
        return self._through(attention.o_proj, out)

    def _heads(self, attention: Any, index: int, normed: Tensor) -> Tensor:
        """Queries, keys and values side by side, [B, N, (Q + 2 G) D]."""
        joined = self._layer(index)
        if joined is not None:
            return self._steps.product(normed, *joined.query_key_value)
        # something wraps these layers, or they are trained
        return torch.cat((attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)), -1)

    def feed_forward(self, layer: Any, index: int, normed: Tensor) -> Tensor:
        mlp, joined = layer.mlp, self._layer(index)
        if joined is None or joined.gate_up is None:
            out: Tensor = mlp(normed)
            return out
        by_tanh = type(mlp.act_fn).__name__ in TANH
        gate_up = self._steps.product(normed, *joined.gate_up)
        return self._through(mlp.down_proj, self._steps.gated(gate_up, by_tanh=by_tanh))

    def project(self, hidden: Tensor) -> Tensor:
        assert self._head is not None, "states alone are asked for where there is no projection"
        return self._through(self._head, hidden)

    def _through(self, layer: Any, x: Tensor) -> Tensor:
        """What a layer puts out; by the step of that name where it is a linear layer and no more."""
        if is_bare(layer):
            return self._steps.product(x, layer.weight, layer.bias)
        out: Tensor = layer(x)
        return out

    def _layer(self, index: int) -> JoinedLayer | None:
        return None if self._joined is None else self._joined.layers[index]


def _groups(attention: Any) -> int:
    """Key-value heads."""
    return int(attention.config.num_key_value_heads)


@cache
def _steps() -> LayerKernels:
    return TritonKernels() if kernels.available() else TorchKernels()


class TorchKernels:
    """In torch alone."""

    def enter(
        self,
        hidden: Tensor,
        out: Tensor | None,
        post_norm: Tensor | None,
        weight: Tensor,
        eps: float,
        *,
        from_one: bool,
    ) -> tuple[Tensor, Tensor]:
        if out is not None:
            hidden = hidden + (out if post_norm is None else _normed(out, post_norm, eps, from_one))
        return hidden, _normed(hidden, weight, eps, from_one)

    def place_heads(
        self,
        joined: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        turn: tuple[Tensor, Tensor],
        stores: tuple[Tensor, Tensor],
        slots_BN: Tensor,
        eps: float,
        *,
        from_one: bool,
    ) -> Tensor:
        keys, values = stores
        G, D = keys.shape[1], keys.shape[3]
        B, N, _ = joined.shape
        heads_BNXD = joined.view(B, N, -1, D)
        query, key, value = heads_BNXD.split([heads_BNXD.shape[2] - 2 * G, G, G], 2)
        if norms is not None:
            query, key = (_normed(each, norm, eps, from_one) for each, norm in zip((query, key), norms, strict=True))
            both = torch.cat((query, key), 2)
        else:
            both = heads_BNXD[:, :, :-G]
        both = turned(both.transpose(1, 2), turn_of(*turn))
        slots = slots_BN[:, None, :, None].expand(B, G, N, D)
        keys.scatter_(2, slots, both[:, -G:])
        values.scatter_(2, slots, value.transpose(1, 2))
        return both[:, :-G]

    def gated(self, gate_up: Tensor, *, by_tanh: bool) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") if by_tanh else F.silu(gate)) * up

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, slots: int, scale: float
    ) -> Tensor:
        out = F.scaled_dot_product_attention(
            query, keys[:, :, :slots], values[:, :, :slots], attn_mask=mask, scale=scale, enable_gqa=True
        )
        B, _, N, _ = query.shape
        return out.transpose(1, 2).reshape(B, N, -1)


def _normed(x: Tensor, weight: Tensor, eps: float, from_one: bool) -> Tensor:
    if not from_one:
        return F.rms_norm(x, weight.shape, weight, eps)
    plain = F.rms_norm(x, weight.shape, None, eps)
    return torch.addcmul(plain, plain, weight)


class TritonKernels(TorchKernels):
    """By kernels of our own, each of which is one of the steps."""

    def __init__(self) -> None:
        from ...kernels import attend, layer

        self.enter = layer.enter  # type: ignore[method-assign]
        self.place_heads = layer.place_heads  # type: ignore[method-assign]
        self.gated = layer.gated  # type: ignore[method-assign]
        self.product = kernels.linear  # type: ignore[method-assign]
        self._in_parts = attend.attend

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, slots: int, scale: float
    ) -> Tensor:
        assert mask is not None, "a tree has one"
        return self._in_parts(query, keys, values, mask, slots, scale)


class WholeRowKernels(TorchKernels):
    """Whole rows, each of which reads itself: many tokens, for which a library's products and attention serve best."""

    def __init__(self) -> None:
        own = _steps()
        self.enter, self.place_heads, self.gated = own.enter, own.place_heads, own.gated  # type: ignore[method-assign]

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, slots: int, scale: float
    ) -> Tensor:
        B, Q, N, D = query.shape
        # of the kernels that read a mask most want each query head to have keys of its own
        keys, values = (each.repeat_interleave(Q // each.shape[1], 1) for each in (keys, values))
        out = F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, is_causal=mask is None and N > 1)
        return out.transpose(1, 2).reshape(B, N, -1)


class RowKeyValues:
    """Keys and values of whole rows, dropped after each layer; see `forward.KeyValueSlots`."""

    def __init__(self, tokens_RS: Tensor) -> None:
        self._tokens_RS = tokens_RS
        self._stores: dict[torch.Size, tuple[Tensor, Tensor]] = {}

    def stores(self, _layer_idx: int, like_BNGD: Tensor) -> tuple[Tensor, Tensor]:
        if like_BNGD.shape not in self._stores:
            shape = like_BNGD.transpose(1, 2).shape
            self._stores[like_BNGD.shape] = like_BNGD.new_empty(shape), like_BNGD.new_empty(shape)
        return self._stores[like_BNGD.shape]

    def slots_of(self, device: torch.device) -> Tensor:
        R, S = self._tokens_RS.shape
        return torch.arange(S, device=device).repeat(R, 1)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


def states_in_rows(decoder: Any, inputs: dict[str, Any], states: HiddenStates) -> None:
    """Let `states` take what it was asked for of a decoder's pass over whole rows, without gradients.

    `inputs`: `input_ids`, `position_ids` and `attention_mask`, as the decoder takes them.
    """
    ids_RS = inputs["input_ids"]
    joined = JoinedDecoder(decoder) if can_join(decoder) else None
    runner = OnCuda(decoder, joined, steps=WholeRowKernels())
    lean_states(
        decoder, runner, ids_RS, inputs["attention_mask"], inputs["position_ids"], RowKeyValues(ids_RS), states=states
    )
