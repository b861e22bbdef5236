"""What forward passes leave in a device's memory, estimated from the widths of the layers.

Read next: `memory.py`, the sum that it goes into.

Letters: T tokens of a forward pass in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ..recipe.model import Recipe
from .devices import devices_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...trainers.methods import PassMemory

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class _Linear(NamedTuple):
    """A layer that multiplies by a matrix."""

    weight: Tensor
    in_features: int
    out_features: int


def activations(recipe: Recipe, student: nn.Module, target: nn.Module | None) -> float:
    """An estimate of what forward passes hold at their peak, the backward pass still ahead.

    Every linear layer counts what it reads and what it makes, and a quarter more for the norms,
    gates and products around them: so much was counted in real passes (tests/launch).
    """
    from ...trainers.student.recomputed import decoder_layers

    T = micro_tokens(recipe)
    parts = recipe.loop.context_parallel if recipe.record.cuts_rows else 1  # others refuse it
    speaks: Any = student if target is None else target
    # of each position that is spoken of: what its loss reads, where it counts, and the gradient
    width = _kept(recipe, student) + 3 * _hidden(speaks) * recipe.record.memory.positions(recipe)
    # a mask of truth values becomes numbers in every layer anew, as long as the layer's pass is kept
    masks = sum(name.endswith("k_proj") for name, _ in _linear(student))
    width += recipe.record.memory.mask(recipe) * (min(masks, 1) if _by_layers(recipe) else masks)
    if recipe.tunes_target and target is not None:  # it learns too, so its layers keep what they read
        again = decoder_layers(target) if recipe.tune.recompute else []
        width += _held(recipe, target, again, lambda part: _tuned_width(recipe, part))
    # the gradient of an own projection is made in the forward pass, in fp32
    width = width / parts + (_of_other_parts(recipe, student) if parts > 1 else 0)
    return 1.25 * T * width * number_size(recipe) + 4.0 * _own_projections(student, recipe.record.memory)


def _of_other_parts(recipe: Recipe, student: nn.Module) -> float:
    """Numbers over a token of a row that several processes share, on the one that has its end.

    The first pass's keys and values of the whole row, as they come, for that pass and for the later ones; and in every
    pass zeros for the queries of other parts, with what attention makes of them (`drafters/layers/passes.py`).
    """
    ends = {name.rpartition(".")[2]: layer.out_features for name, layer in _linear(student)}
    passes = 1 if recipe.record.recomputes(recipe) else recipe.record.memory.passes(recipe)
    others = 1 - 1 / recipe.loop.context_parallel
    return 3 * (ends["k_proj"] + ends["v_proj"]) + 2 * ends["q_proj"] * passes * others


def _kept(recipe: Recipe, student: nn.Module) -> float:
    """Numbers of all passes over a token; of one that is computed again its output, keys and values alone, or what its
    layers read."""
    memory = recipe.record.memory
    passes, whole = memory.passes(recipe), sum(_widths(student, memory))
    if not recipe.record.recomputes(recipe):
        return whole * passes
    if memory.recomputed_layers is not None:
        again = memory.recomputed_layers(student)
        held = _held(recipe, student, again, lambda part: sum(_widths(part, memory)), inputs=memory.keeps_inputs)
        # as they come, behind their norm, and turned to their positions
        return held * (passes - memory.text_only) + 3 * sum(_keys_and_values(student)) * (memory.text_only > 0)
    ends = [layer.out_features for name, layer in _linear(student) if name.endswith(("k_proj", "v_proj", "down_proj"))]
    return whole + sum(ends) * passes


def _by_layers(recipe: Recipe) -> bool:
    return recipe.record.memory.recomputed_layers is not None and recipe.record.recomputes(recipe)


def _held(
    recipe: Recipe,
    model: nn.Module,
    again: Sequence[nn.Module],
    width: Callable[[nn.Module], float],
    *,
    inputs: bool = True,
) -> float:
    """Numbers of a pass over a token whose layers `again` are computed again one at a time.

    What each of these reads is kept, in fp32 under a lower precision too, and of one of them all.

    Args:
        width: numbers that a part keeps otherwise.
        inputs: off, nothing that they read is kept.
    """
    inside = [width(layer) for layer in again]
    read = sum(layer.in_features for each in again for _, layer in islice(_linear(each), 1)) if inputs else 0
    return width(model) - sum(inside) + max(inside, default=0) + read * BYTES["fp32"] / number_size(recipe)


def _keys_and_values(model: nn.Module) -> Iterator[int]:
    yield from (layer.out_features for name, layer in _linear(model) if name.endswith(("k_proj", "v_proj")))


def _tuned_width(recipe: Recipe, part: nn.Module) -> float:
    """Numbers over a token of a target's part that learns; a low-rank change reads what dropout has left of it."""
    tune, widths = recipe.tune, sum(_widths(part))
    if tune.how == "full" or not tune.dropout:
        return widths
    named = tuple(tune.layers) or ""  # none: every layer
    changed = [layer for name, layer in _linear(part) if name.endswith(named) and not _to_a_vocabulary(name, None)]
    return widths + sum(layer.in_features + 2 * tune.rank for layer in changed)


def reading(recipe: Recipe, target: Any) -> float:
    """The frozen target's forward pass: of a layer that is done nothing but its states is kept."""
    from ...decoding.backbone.experts import expert_widths

    T = micro_tokens(recipe)
    # three fused states, the last and an embedding are handed over at most; the widest part of a
    # layer is there four times, or rows for each of a token's experts once
    widest = max(4 * max(_widths(target), default=0), *expert_widths(target), 0)
    return float(T * (5 * _hidden(target) + widest) * BYTES[recipe.target.dtype])


def micro_tokens(recipe: Recipe) -> int:
    """Tokens of the rows that go through at once, T."""
    return recipe.loop.micro_rows * recipe.row_tokens


def _hidden(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).hidden_size)


def _widths(model: nn.Module, memory: PassMemory | None = None) -> Iterator[int]:
    """Numbers in and out of every linear layer, per token; projections go through in chunks.

    Args:
        memory: of the method, where the model is what it trains.
    """
    for name, layer in _linear(model):
        if not _to_a_vocabulary(name, memory):
            yield layer.in_features + layer.out_features
        more = {} if memory is None else memory.kept_inputs
        yield from (times * layer.in_features for end, times in more.items() if name.endswith(end))


def _own_projections(student: nn.Module, memory: PassMemory) -> int:
    """Numbers in the projections to a vocabulary that are trained."""
    heads = {id(layer.weight): layer for name, layer in _linear(student) if _to_a_vocabulary(name, memory)}
    return sum(layer.weight.numel() for layer in heads.values() if layer.weight.requires_grad)


def _to_a_vocabulary(name: str, memory: PassMemory | None) -> bool:
    """Whether a linear layer's name is that of a projection, or of what is added to one."""
    return "lm_head" in name or (memory is not None and name.endswith(memory.logit_layers))


def _linear(model: nn.Module) -> Iterator[tuple[str, _Linear]]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, _Linear(module.weight, module.in_features, module.out_features)
        elif isinstance(module, Conv1D):  # GPT-2's, its weight the other way round
            yield name, _Linear(module.weight, module.nx, module.nf)


def number_size(recipe: Recipe) -> int:
    """Bytes of a number in the precision of the run."""
    return BYTES[recipe.loop.precision_on(cpu=devices_of(recipe).on_cpu)]
