"""The pre-flight's sum of memory: what one device holds while a recipe trains.

Weights, gradients and moments are counted on shapes; what the forward passes leave behind is an
estimate from the widths of the layers. Read next: `check/models.py`, which makes the shapes.

Letters: P trained numbers, N processes, T tokens of a forward pass in one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import EnvironmentFailure, RequestError
from ..recipe.model import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...trainers.methods import Method

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FREE_SHARE = 0.9  # of a described device: kernels, communication and the allocator take the rest


class _Linear(NamedTuple):
    """A layer that multiplies by a matrix."""

    weight: Tensor
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Devices:
    """What a run is to use: the machine at hand, or the one that the recipe describes."""

    processes: int
    memory: float
    """Bytes that training may fill, of each."""
    sharding: str
    described: bool
    on_cpu: bool = False

    def __str__(self) -> str:
        each = f"{in_units(self.memory)} each" if self.processes > 1 else in_units(self.memory)
        return f"{self.processes} device{'s' * (self.processes > 1)}, {each}"


def devices_of(recipe: Recipe) -> Devices:
    """The devices of the recipe's `machine`, or those here."""
    from ...decoding.devices import runs_on_cpu

    machine = recipe.machine
    if machine.processes is None:
        return Devices(processes(), device_memory(), "none", described=False, on_cpu=runs_on_cpu())
    memory = machine.device_gb * 1e9
    # one process has nothing to spread, unless the recipe itself asks for DeepSpeed there
    alone = machine.processes == 1 and "sharding" not in machine.model_fields_set
    return Devices(machine.processes, memory, "none" if alone else machine.sharding, described=True)


def check_sharding(recipe: Recipe) -> None:
    """Raise RequestError for what the trainers refuse under the described launch."""
    from ...trainers.loop.setup import check_optimizer
    from ...trainers.loop.sharding import check_no_average
    from ...trainers.student.compiled import check_no_deepspeed
    from ...trainers.student.lora import CUT_BY_ZERO_3

    sharding = devices_of(recipe).sharding
    if sharding != "none":
        check_optimizer(recipe.optimizer, where=f", and machine.sharding is {sharding}")
        check_no_deepspeed(recipe.loop)
    if sharding == "zero3":
        check_no_average(recipe.loop.ema)
        if recipe.rollouts.share:
            raise RequestError(
                "rollouts.share is above 0 and machine.sharding is zero3, which cuts the draft into "
                "pieces that decoding would have to gather for every token; use zero2 or less"
            )
        if recipe.lora.rank is not None:
            raise RequestError(CUT_BY_ZERO_3)
        if recipe.tunes_target:
            raise RequestError(
                "machine.sharding is zero3, and a target that is trained with its drafter decodes "
                "in probes as it is, which ZeRO-3 cuts into pieces; use zero2"
            )


def needs(recipe: Recipe, student: nn.Module, target: nn.Module | None) -> dict[str, float]:
    """Bytes of one device by what fills them; `target` is None where none is read."""
    devices = devices_of(recipe)
    speaks: Any = student if target is None else target
    vocabulary = int(speaks.config.get_text_config(decoder=True).vocab_size)
    # logits, their softmax and gradient of draft and target exist for one chunk at a time
    chunk = recipe.objective.chunk * vocabulary * 4 * BYTES["fp32"]
    need = {"weights, gradient and moments": _state(recipe, student, devices), "a chunk of logits": float(chunk)}
    frozen = parameters(student) - trained(student)
    if frozen:
        need["the adapter's base"] = frozen * float(BYTES["fp32"])
    if target is not None:
        if recipe.features.source == "engine":
            need["the target's ends"] = ends_bytes(recipe, target)
        else:
            need |= _target_held(recipe, target, devices)
            need["its pass"] = _reading(recipe, target)
    need["activations"] = _activations(recipe, student, target)
    if target is not None and recipe.features.source == "engine":
        early = _for_the_proof(recipe, target) - sum(need.values()) + need["the target's ends"]
        need |= {"layers that prove the engine": early} if early > 0 else {}
    return need


def ends_bytes(recipe: Recipe, target: nn.Module) -> float:
    """Bytes of embedding, last norm and projection: all that stays here of a target that an engine has."""
    return (parameters(target) - sum(layer_sizes(target))) * float(BYTES[recipe.target.dtype])


def _for_the_proof(recipe: Recipe, target: nn.Module) -> float:
    """Bytes of the first layers, which are here until the engine is proved, before anything is trained."""
    from ...trainers.teacher.handshake import KEPT_LAYERS

    return sum(layer_sizes(target)[:KEPT_LAYERS]) * float(BYTES[recipe.target.dtype])


def _target_held(recipe: Recipe, target: nn.Module, devices: Devices) -> dict[str, float]:
    """Bytes of a frozen target on one device: all of it, or its share of the layers and those that it gathers."""
    config, size = recipe.target, float(BYTES[recipe.target.dtype])
    if not config.is_shared or (devices.processes == 1 and not config.offload):
        return {"the target": held_bytes(recipe, target)}
    layers = layer_sizes(target)
    outside = parameters(target) - sum(layers)
    if config.tensor_parallel > 1:
        return {"its share of the target": (outside + sum(layers) / config.tensor_parallel) * size}
    share = 0 if config.offload else sum(layers) / devices.processes
    what = "the target's ends" if config.offload else "its share of the target"
    # the layer that rows go through, and the next one on its way
    return {what: (outside + share) * size, "two gathered layers": 2 * max(layers) * size}


def held_bytes(recipe: Recipe, target: nn.Module) -> float:
    """Bytes of a whole target: those of quantised layers by their bits, the scales of groups left out."""
    from ...decoding.target.quantised import bytes_a_weight, linear

    size = float(BYTES[recipe.target.dtype])
    packed = bytes_a_weight(recipe.target.quantization, target.config)
    if packed is None:
        return parameters(target) * size
    head: Any = target
    own = head.get_output_embeddings()
    rounded = sum(layer.weight.numel() for _, layer in linear(target) if layer is not own)
    return (parameters(target) - rounded) * size + rounded * packed


def layer_sizes(target: nn.Module) -> list[int]:
    """Numbers in the weights of each decoder layer."""
    from ...decoding.target.hidden_states import decoder_of, layer_count, layers_of

    return [parameters(each) for each in layers_of(decoder_of(target), layer_count(target))]


def fits(need: dict[str, float], devices: Devices) -> bool:
    """Whether a device holds it."""
    return sum(need.values()) <= devices.memory * (_FREE_SHARE if devices.described else 1)


def check_fits(need: dict[str, float], devices: Devices, nearest: Callable[[], str | None]) -> None:
    """Raise EnvironmentFailure when a device does not hold it; processes here may share it.

    Args:
        nearest: finds what to change, as the end of the message; None where nothing that it tries helps.
    """
    if fits(need, devices) or (devices.processes > 1 and not devices.described):
        return
    listed = ", ".join(f"{in_units(count)} for {what}" for what, count in need.items())
    where = f"each of {devices.processes} devices" if devices.processes > 1 else "the device"
    kept = ", a tenth of it kept free" if devices.described else ""
    remedy = nearest() or (
        "Take a smaller model, objective.chunk, data.sequence_length or loop.micro_rows, or spread it over more "
        "processes (machine.sharding)"
    )
    raise EnvironmentFailure(f"training needs {listed}; {where} has {in_units(devices.memory)}{kept}. {remedy}")


def _state(recipe: Recipe, student: nn.Module, devices: Devices) -> float:
    """What the optimiser needs of P trained numbers, AdamW's two moments in fp32 among it."""
    P, N, full = trained(student), devices.processes, _number_size(recipe)
    # fp32 weight, moments and gradient, and the gradient in the precision of the run
    pieces = (4 + 8 + 4 + full) * P / N
    if devices.sharding == "zero2":  # DeepSpeed's own sum: whole weights, the rest in pieces
        return full * P + pieces
    if devices.sharding == "zero3":
        largest = max((p.numel() for p in student.parameters()), default=0)
        return 2 * full * largest + pieces
    buckets = 4 if N > 1 else 0  # in which DDP exchanges gradients
    copies = full if full < 4 else 0  # autocast keeps the weights that it has rounded
    return (16.0 + buckets + copies) * P


def _activations(recipe: Recipe, student: nn.Module, target: nn.Module | None) -> float:
    """An estimate of what forward passes hold at their peak, the backward pass still ahead.

    Every linear layer counts what it reads and what it makes, and a quarter more for the norms,
    gates and products around them: so much was counted in real passes (tests/launch).
    """
    from ...trainers.student.recomputed import decoder_layers

    T = micro_tokens(recipe)
    parts = recipe.loop.context_parallel if recipe.record.cuts_rows else 1  # others refuse it
    speaks: Any = student if target is None else target
    # of each position that is spoken of: what its loss reads, where it counts, and the gradient
    width = _kept(recipe, student) + 3 * _hidden(speaks) * recipe.record.positions(recipe)
    # a mask of truth values becomes numbers in every layer anew, as long as the layer's pass is kept
    masks = sum(name.endswith("k_proj") for name, _ in _linear(student))
    width += recipe.record.mask(recipe) * (min(masks, 1) if _by_layers(recipe) else masks)
    if recipe.tunes_target and target is not None:  # it learns too, so its layers keep what they read
        again = decoder_layers(target) if recipe.tune.recompute else []
        width += _held(recipe, target, again, lambda part: _tuned_width(recipe, part))
    # the gradient of an own projection is made in the forward pass, in fp32
    width = width / parts + (_of_other_parts(recipe, student) if parts > 1 else 0)
    return 1.25 * T * width * _number_size(recipe) + 4.0 * _own_projections(student, recipe.record)


def _of_other_parts(recipe: Recipe, student: nn.Module) -> float:
    """Numbers over a token of a row that several processes share, on the one that has its end.

    The first pass's keys and values of the whole row, as they come, for that pass and for the later ones; and in every
    pass zeros for the queries of other parts, with what attention makes of them (`drafters/eagle/passes.py`).
    """
    ends = {name.rpartition(".")[2]: layer.out_features for name, layer in _linear(student)}
    passes = 1 if recipe.record.recomputes(recipe) else recipe.record.passes(recipe)
    others = 1 - 1 / recipe.loop.context_parallel
    return 3 * (ends["k_proj"] + ends["v_proj"]) + 2 * ends["q_proj"] * passes * others


def _kept(recipe: Recipe, student: nn.Module) -> float:
    """Numbers of all passes over a token; of one that is computed again its output, keys and values alone, or what its
    layers read."""
    record = recipe.record
    passes, whole = record.passes(recipe), sum(_widths(student, record))
    if not record.recomputes(recipe):
        return whole * passes
    if record.recomputed_layers is not None:
        again = record.recomputed_layers(student)
        held = _held(recipe, student, again, lambda part: sum(_widths(part, record)), inputs=record.keeps_inputs)
        # as they come, behind their norm, and turned to their positions
        return held * (passes - record.beside) + 3 * sum(_keys_and_values(student)) * (record.beside > 0)
    ends = [layer.out_features for name, layer in _linear(student) if name.endswith(("k_proj", "v_proj", "down_proj"))]
    return whole + sum(ends) * passes


def _by_layers(recipe: Recipe) -> bool:
    return recipe.record.recomputed_layers is not None and recipe.record.recomputes(recipe)


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
    return width(model) - sum(inside) + max(inside, default=0) + read * BYTES["fp32"] / _number_size(recipe)


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


def _reading(recipe: Recipe, target: Any) -> float:
    """The frozen target's forward pass: of a layer that is done nothing but its states is kept."""
    from ...decoding.target.experts import expert_widths

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


def _widths(model: nn.Module, record: Method | None = None) -> Iterator[int]:
    """Numbers in and out of every linear layer, per token; projections go through in chunks.

    Args:
        record: of the method, where the model is what it trains.
    """
    for name, layer in _linear(model):
        if not _to_a_vocabulary(name, record):
            yield layer.in_features + layer.out_features
        more = {} if record is None else record.kept_inputs
        yield from (times * layer.in_features for end, times in more.items() if name.endswith(end))


def _own_projections(student: nn.Module, record: Method) -> int:
    """Numbers in the projections to a vocabulary that are trained."""
    heads = {id(layer.weight): layer for name, layer in _linear(student) if _to_a_vocabulary(name, record)}
    return sum(layer.weight.numel() for layer in heads.values() if layer.weight.requires_grad)


def _to_a_vocabulary(name: str, record: Method | None) -> bool:
    """Whether a linear layer's name is that of a projection, or of what is added to one."""
    return "lm_head" in name or (record is not None and name.endswith(record.logit_layers))


def _linear(model: nn.Module) -> Iterator[tuple[str, _Linear]]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, _Linear(module.weight, module.in_features, module.out_features)
        elif isinstance(module, Conv1D):  # GPT-2's, its weight the other way round
            yield name, _Linear(module.weight, module.nx, module.nf)


def parameters(model: nn.Module) -> int:
    """How many numbers are in the weights; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def trained(model: nn.Module) -> int:
    """How many of them move: of a draft with an adapter, the adapter's."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def processes() -> int:
    """Processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device_memory() -> int:
    """Bytes of the first GPU, or of the machine where a run computes on its CPU."""
    import psutil
    import torch

    from ...decoding.devices import runs_on_cpu

    if runs_on_cpu():
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(0).total_memory)


def _number_size(recipe: Recipe) -> int:
    """Bytes of a number in the precision of the run."""
    return BYTES[recipe.loop.precision_on(cpu=devices_of(recipe).on_cpu)]


def in_units(count: float) -> str:
    """Bytes in the unit that fits, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
