"""The projections of a frozen model on a CPU, stacked and laid out for products with few rows.

Query, key and value become one product, gate and up another: a small model's call mostly takes the time to reach its
products, and a layer then has three fewer of them. The layout of a weight decides half of a product's time: in fp32
the best one depends on the number of tokens and on the processor (`FusedLinear`), in bf16 and in larger models it is
oneDNN's (`PackedLinear`). The stack is a copy of the weights, so it is made up to a size, and made again when a weight
has changed. `SharedInputLinears` is the same for a module of our own, such as a drafter's layer. Read next:
`lean/on_cpu.py`, which runs the stack.

Shapes: B rows, N tokens, H hidden, Q query heads, G key-value heads, D head size, I inner size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..devices import Kind, kind, multiplies_bf16

_MOST = 100_000_000
"""Numbers of a model in fp32 up to which every number of rows has a layout of its own, which is three copies."""
_MOST_COPIED = 2**32
"""Bytes of a model up to which its weights are laid out a second time."""
_MOST_TRIPLED, _MOST_SHARED = 5_000_000, 200_000_000
"""Both for the layers of one product, in numbers."""
_LEAST_PACKED = 2**16
"""Numbers of a weight below which another way to its product costs more than it saves."""
_ROWS, _MOST_ROWS = 5, 64
"""Rows that oneDNN's layout is made for, those of a verify call; and up to how many it is taken.

It keeps a compiled kernel per number of rows, which prompts have any of.
"""
_MOST_TURNED = 5
"""Rows up to which W x^T is faster than x W^T without AVX-512."""
_LEAST_ROWS: dict[Kind, int] = {"amx": 4, "avx512": 3, "narrower": 2}
"""Rows from which oneDNN's layout is taken, where it is."""
_LARGE = 2**19
"""Numbers of a weight from which oneDNN is the faster one on every processor: an output projection's."""


class PackedLinear(NamedTuple):
    """Several linear layers as one product in oneDNN's layout, and for many rows as the layers themselves.

    One copy of the weights, where `FusedLinear` keeps up to three. In bf16 it is the fastest one for any few rows, and
    its numbers are those of the layers to the bit.
    """

    packed: Tensor
    bias: Tensor | None
    layers: tuple[nn.Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() <= _MOST_ROWS * x.shape[-1]:
            return product(x, self.packed, self.bias)
        outputs = [layer(x) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


class FusedLinear(NamedTuple):
    """Several linear layers as one, each number of rows by the kernel that is fastest for it.

    With AVX-512: column by column for a token or two, by oneDNN for more. With AMX's tiles too: column by column
    throughout, except output projections, which go by oneDNN from four tokens on. Without AVX-512: by W x^T
    for two to five tokens, a verify call's, which is faster there than x W^T; output projections by oneDNN from two
    tokens on. Measured by `benchmarks/verify_call.py`. The kernel depends on the processor and the shapes alone, never
    on a clock, so that equal calls give equal bits.
    """

    weight: Tensor
    """[O, I], as `F.linear` is fastest with it for one token."""
    bias: Tensor | None
    packed: Tensor | None
    """The same weight as oneDNN's kernels read it; None where it is small, or oneDNN is not here."""
    least_packed: int
    """Rows from which the packed one is taken."""
    rowwise: Tensor | None
    """The same weight row by row, for W x^T; None where that is never the fastest."""

    @staticmethod
    def of(layers: Sequence[nn.Linear]) -> FusedLinear:
        """The outputs of `layers`, one behind the other."""
        weight, bias = _joined(layers)
        columns = weight.t().contiguous().t()
        processor, large = kind(), weight.numel() >= _LARGE
        packed = laid_out(weight, _ROWS) if large or processor != "amx" else None
        turned = processor == "narrower" and weight.device.type == "cpu" and _LEAST_PACKED <= weight.numel() < _LARGE
        if not turned:
            return FusedLinear(columns, bias, packed, _LEAST_ROWS[processor], None)
        wide = weight.shape[1] > weight.shape[0]
        return FusedLinear(weight if wide else columns, bias, packed, _MOST_TURNED + 1, weight)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if self.rowwise is not None and 2 <= rows <= _MOST_TURNED:
            return self._turned(self.rowwise, x)
        if self.packed is not None and self.least_packed <= rows <= _MOST_ROWS:
            return product(x, self.packed, self.bias)
        return F.linear(x, self.weight, self.bias)

    def _turned(self, weight: Tensor, x: Tensor) -> Tensor:
        out_OR = torch.mm(weight, x.reshape(-1, x.shape[-1]).t())
        # row by row again: what follows reads along a token's numbers
        out = out_OR.t().contiguous().view(*x.shape[:-1], -1)
        return out if self.bias is None else out.add_(self.bias)


def as_one(layers: Sequence[nn.Linear], *, small: bool) -> FusedLinear | PackedLinear:
    """Linear layers as one product, in the layouts that are fastest for few rows.

    Args:
        small: whether three copies of the weights in fp32 are affordable.
    """
    if small and layers[0].weight.dtype == torch.float32:
        return FusedLinear.of(layers)
    weight, bias = _joined(layers)
    packed = laid_out(weight, _ROWS)
    if packed is None:
        return FusedLinear(weight, bias, None, 0, None)
    return PackedLinear(packed, bias, tuple(layers))


def _joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None


def laid_out(weight: Tensor, rows: int) -> Tensor | None:
    """A copy of a weight [O, I] as oneDNN's kernels read it for products with so many rows; None where that is none.

    `product` takes it, with any number of rows.
    """
    if not _packs(weight):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` by a weight that `laid_out` has made; it has no gradient."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN is here for a product of this size: below it the way to its kernel costs more than it saves."""
    return (
        weight.numel() >= _LEAST_PACKED
        and weight.device.type == "cpu"
        and _multiplies(weight.dtype)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor has instructions for products of that type."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bf16())


class SharedInputLinears:
    """Linear layers of a module with one input: one product while they are frozen, on a CPU.

    The layers are looked up when they run, so that what replaces or wraps them is what runs.
    """

    def __init__(self, owner: nn.Module, *names: str) -> None:
        self._owner, self._names = owner, names
        self._joined: FusedLinear | PackedLinear | None = None
        self._state: list[int] = []

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """The output of each, [..., width]."""
        out = self.joined(x)
        if out is None:
            return self.apart(x)
        return (out,) if len(self._names) == 1 else out.split([layer.out_features for layer in self._layers], -1)

    @property
    def _layers(self) -> list[Any]:
        return [self._owner._modules[name] for name in self._names]

    def apart(self, x: Tensor) -> tuple[Tensor, ...]:
        """The output of each, by itself."""
        return tuple(through(layer, x) for layer in self._layers)

    def joined(self, x: Tensor) -> Tensor | None:
        """All outputs, one behind the other, where they are one product; else None."""
        layers = self._layers
        state = _frozen_state(layers) if _reads(x) else None
        if state is None:
            self._joined, self._state = None, []
            return None
        if state != self._state:
            self._joined, self._state = _shared(layers), state
        return None if self._joined is None else self._joined(x)


def _reads(x: Tensor) -> bool:
    """Whether a product without gradients on a CPU is what is asked for, of a type that its processor multiplies."""
    return not (
        torch.compiler.is_compiling()  # of what is trained
        or torch.is_grad_enabled()
        or x.device.type != "cpu"
        or not _multiplies(x.dtype)
        or torch.is_autocast_enabled("cpu")
    )


def _shared(layers: Sequence[Any]) -> FusedLinear | PackedLinear | None:
    """The layers as one product; None where they differ in type, or a copy of them would be too large."""
    weights = [layer.weight for layer in layers]
    numbers, kinds = sum(each.numel() for each in weights), {each.dtype for each in weights}
    if len(kinds) > 1 or not _multiplies(*kinds) or numbers > _MOST_SHARED:
        return None
    return as_one(layers, small=numbers <= _MOST_TRIPLED)


def _frozen_state(layers: Sequence[Any]) -> list[int] | None:
    """`_state_of` the layers' weights; None where one is not plain and frozen.

    Every call of a drafter's layer asks for it, so it reads the modules' own dictionaries: access by attribute
    would take as long as the products.
    """
    if not all(map(is_plain, layers)):
        return None
    return _state_of(each for layer in layers for each in layer._parameters.values() if each is not None)


def _state_of(weights: Iterable[Tensor]) -> list[int]:
    """Numbers that change when a weight is written to, or put elsewhere."""
    return [number for each in weights for number in (each._version, each.data_ptr())]


class Stacked(NamedTuple):
    """A layer's projections by what they read."""

    query_key_value: FusedLinear | PackedLinear
    out: FusedLinear | PackedLinear
    gate_up: FusedLinear | PackedLinear
    down: FusedLinear | PackedLinear
    key_heads: int
    head_norm: Tensor | None
    """The weights of the norms of query and key heads, [Q + G, D]."""


class Stack:
    """The stacked layers of a model, as long as its weights stay."""

    def __init__(self, model: Any) -> None:
        self._head_weights = [*model.lm_head.parameters()]
        self._weights = [*self._head_weights]
        for layer in model.model.layers:
            self._weights += [*layer.self_attn.parameters(), *layer.mlp.parameters()]
        self._state, self._head_state = self._now(), _state_of(self._head_weights)
        small = _numbers(model) <= _MOST
        self.layers = [_stacked(layer, small=small) for layer in model.model.layers]
        self.head = as_one([model.lm_head], small=small)

    @property
    def is_current(self) -> bool:
        """Whether no weight has been written to, or put elsewhere, since."""
        return self._now() == self._state

    @property
    def head_is_current(self) -> bool:
        """The same of the output projection alone, which is cheaper to know."""
        return _state_of(self._head_weights) == self._head_state

    def _now(self) -> list[int]:
        return _state_of(self._weights)


def can_stack(model: Any) -> bool:
    """Whether a model is frozen, not too large for a copy, and of plain linear layers that nobody looks into."""
    if not _multiplies(model.dtype) or _numbers(model) * model.dtype.itemsize > _MOST_COPIED:
        return False
    projections = (each for layer in model.model.layers for part in _PARTS for each in _layers(layer, part))
    return all(map(is_plain, (model.lm_head, *projections)))


def _numbers(model: Any) -> int:
    return sum(each.numel() for each in model.parameters())


_PARTS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)


def _layers(layer: Any, part: tuple[str, tuple[str, ...]]) -> list[Any]:
    module, names = part
    return [getattr(getattr(layer, module), name) for name in names]


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is linear and no more, frozen, and nobody looks at what goes in or comes out."""
    weight = layer._parameters.get("weight")
    return is_bare(layer) and weight is not None and not weight.requires_grad and not weight.is_inference()


def is_bare(layer: nn.Module) -> bool:
    """Whether a layer is linear and no more, and nobody looks at what goes in or comes out."""
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    return type(layer._parameters.get("weight")) is nn.Parameter


def through(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer puts out; on a GPU by the product for few rows, where it is linear and no more."""
    if kernels.serve(x) and is_bare(layer):
        linear: Any = layer
        return kernels.linear(x, linear.weight, linear.bias)
    out: Tensor = layer(x)
    return out


def _stacked(layer: Any, *, small: bool) -> Stacked:
    query_key_value, out, gate_up, down = (as_one(_layers(layer, part), small=small) for part in _PARTS)
    attention = layer.self_attn
    counts = [each.weight.shape[0] // attention.head_dim for each in (attention.q_proj, attention.k_proj)]
    head_norm = None
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight, attention.k_norm.weight)
        head_norm = torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])
    return Stacked(query_key_value, out, gate_up, down, counts[1], head_norm)
