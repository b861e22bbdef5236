"""The pre-flight's sum of memory: what one device holds while a recipe trains.

Weights, gradients and moments are counted on shapes; what the forward passes leave behind is an
estimate. Read next: `activations.py`, that estimate; `devices.py`, what there is; `models.py`, which makes the shapes.

Letters: P trained numbers, N processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ...errors import EnvironmentFailure
from ...trainers.config import chunk_of
from ..recipe.model import Recipe
from .activations import BYTES, activations, number_size, reading
from .devices import Devices, devices_of, in_units
from .engine import needs_whole

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


_FREE_SHARE = 0.9  # of a described device: kernels, communication and the allocator take the rest


def needs(recipe: Recipe, student: nn.Module, target: nn.Module | None) -> dict[str, float]:
    """Bytes of one device by what fills them; `target` is None where none is read."""
    devices = devices_of(recipe)
    speaks: Any = student if target is None else target
    vocabulary = int(speaks.config.get_text_config(decoder=True).vocab_size)
    # logits, their softmax and gradient of draft and target exist for one chunk at a time
    chunk = chunk_of(recipe.objective.chunk, vocabulary) * _logit_widths(recipe, vocabulary) * BYTES["fp32"]
    need = {"weights, gradient and moments": _state(recipe, student, devices), "a chunk of logits": float(chunk)}
    need |= _cut_rows(recipe, student)
    frozen = parameters(student) - trained(student)
    if frozen:
        need["the adapter's base"] = frozen * float(BYTES["fp32"])
    if target is not None:
        if recipe.features.source == "engine":
            need["the target's ends"] = ends_bytes(recipe, target)
        else:
            need |= _target_held(recipe, target, devices)
            need["its pass"] = reading(recipe, target)
    need["activations"] = activations(recipe, student, target)
    if target is not None and recipe.features.source == "engine":
        early = _for_the_proof(recipe, target) - sum(need.values()) + need["the target's ends"]
        need |= {"layers that prove the engine": early} if early > 0 else {}
    return need


def _logit_widths(recipe: Recipe, vocabulary: int) -> int:
    """Numbers of a position's logits that are there at once: over a draft vocabulary the draft's are as few."""
    from ...trainers.student.fused import draft_vocabulary

    size, _ = draft_vocabulary(recipe)
    return 4 * vocabulary if size is None else min(4 * vocabulary, 2 * vocabulary + 4 * size)


def _cut_rows(recipe: Recipe, student: nn.Module) -> dict[str, float]:
    """Bytes of the rows of the target's projection that a drafter with a draft vocabulary is compared by."""
    from ...drafters.layers.draft_vocabulary import ids_of

    ids_U = ids_of(student)
    if ids_U is None or any("lm_head" in name for name, _ in student.named_parameters()):
        return {}
    config: Any = student.config
    width = config.hidden if hasattr(config, "hidden") else config.hidden_size
    return {"drafted rows of the projection": float(len(ids_U) * width * number_size(recipe))}


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
    from ...decoding.backbone.quantised import bytes_a_weight, linear

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
    from ...decoding.backbone.hidden_states import decoder_of, layer_count, layers_of

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
    P, N, full = trained(student), devices.processes, number_size(recipe)
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


def parameters(model: nn.Module) -> int:
    """How many numbers are in the weights; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def trained(model: nn.Module) -> int:
    """How many of them move: of a draft with an adapter, the adapter's."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


_SUMS = 2
"""Of a state, in each layer: behind attention and behind the feed-forward part."""


def spread_line(recipe: Recipe, target: PreTrainedModel) -> str:
    """How a target lies over the processes and what that moves, as the end of a sentence; nothing for a whole one."""
    config, devices = recipe.target, devices_of(recipe)
    if not config.is_shared:
        return ""
    host = by_host(recipe, target, devices)
    kept = f"; its host keeps {in_units(host)} for each process" if host else ""
    if devices.processes == 1:
        return kept
    moved = in_units(exchanged(recipe, target, devices))
    return f"; {config.cut_as}, and each pass sends a process {moved}{kept}"


def by_host(recipe: Recipe, target: PreTrainedModel, devices: Devices) -> float:
    """Bytes of an offloaded target's share, of each process, in its host's memory."""
    if not recipe.target.offload:
        return 0.0
    return sum(layer_sizes(target)) * BYTES[recipe.target.dtype] / devices.processes


def exchanged(recipe: Recipe, target: PreTrainedModel, devices: Devices) -> float:
    """Bytes that a process is sent while the rows of one micro-batch of every process pass the target.

    Layers that are cut over all are gathered, however few the rows. A team adds up states, of the rows of all its
    processes: a sum over N of them (a reduction, then a gathering) sends each (N - 1) / N of it twice.
    """
    config, size = recipe.target, BYTES[recipe.target.dtype]
    layers = layer_sizes(target)
    if config.tensor_parallel == 1:
        return sum(layers) * size * (devices.processes - 1) / devices.processes
    team = config.tensor_parallel
    tokens = team * recipe.loop.micro_rows * recipe.row_tokens
    hidden = int(target.config.get_text_config(decoder=True).hidden_size)
    return len(layers) * _SUMS * 2 * (team - 1) / team * tokens * hidden * size


_MOST = 1024  # devices


def nearest_change(recipe: Recipe, student: nn.Module, target: PreTrainedModel | None) -> str | None:
    """The fewest values that make room on the described machine, or on the smallest one that is larger; or None.

    An engine that has the target is named beside them: it takes devices of its own.
    """
    if recipe.machine.processes is None:
        return None
    engine = None if target is None else _with_an_engine(recipe, student, target)
    found = _nearest(recipe, student, target)
    if found is None:
        return engine
    return f"The nearest change that fits is {found}" + (f". {engine}" if engine else "")


def _nearest(recipe: Recipe, student: nn.Module, target: PreTrainedModel | None) -> str | None:
    """The flags of the fewest values, and what they come to."""
    processes = recipe.machine.processes or 1
    while processes <= _MOST:
        for change in _changes(recipe, processes):
            changed = _with(recipe, change)
            devices, need = devices_of(changed), needs(changed, student, target)
            if fits(need, devices):
                host = 0.0 if target is None else by_host(changed, target, devices)
                kept = f", and {in_units(host)} of its host's memory" if host else ""
                return f"{_flags(change)}: about {in_units(sum(need.values()))} on each of {devices}{kept}"
        processes *= 2
    return None


def _with_an_engine(recipe: Recipe, student: nn.Module, target: PreTrainedModel) -> str | None:
    """What a device would hold if an engine had a target that none of them holds whole; None where that is no way."""
    devices = devices_of(recipe)
    alone = {"the target": held_bytes(recipe, target)}
    if recipe.features.source == "engine" or needs_whole(recipe) is not None or fits(alone, devices):
        return None
    need = needs(_with(recipe, {"features.source": "engine"}), student, target)
    if not fits(need, devices):
        return None
    total = in_units(sum(need.values()))
    return f"With the target in an engine (features.source engine, docs/engine.md) it is about {total} on each"


def _changes(recipe: Recipe, processes: int) -> Iterator[dict[str, Any]]:
    """Sets of values by dotted path, the smaller first; only those whose batch can be divided."""
    loop, machine, again = recipe.loop, recipe.machine, recipe.record.recompute
    single: dict[str, Any] = {}
    if machine.sharding == "none" and recipe.optimizer.name == "adamw":
        single["machine.sharding"] = "zero2"
    if loop.micro_rows > 1:
        single["loop.micro_rows"] = 1
    if again and not recipe.record.recomputes(recipe):
        single[again] = True
    more = {"machine.processes": processes} if processes != machine.processes else {}
    sets = [
        more | {path: single[path] for path in paths} | cut
        for count in range(len(single) + 1)
        for paths in combinations(single, count)
        for cut in ({}, *_cuts(recipe, processes))
    ]
    for change in sorted(sets, key=len):
        micro = change.get("loop.micro_rows", loop.micro_rows)
        groups, left = divmod(processes, loop.context_parallel)
        whole_teams = processes % change.get("target.tensor_parallel", recipe.target.tensor_parallel) == 0
        if change and whole_teams and not left and loop.batch_rows % (groups * micro) == 0:
            yield change


def _cuts(recipe: Recipe, processes: int) -> Iterator[dict[str, Any]]:
    """How else a frozen target could lie, the faster way first."""
    target = recipe.target
    if not recipe.record.has_target or recipe.features.source == "engine" or needs_whole(recipe) is not None:
        return
    if target.quantization is not None:  # quantised weights are not cut
        return
    alone = {"target.tensor_parallel": 1} if target.tensor_parallel > 1 else {}
    cut = alone if target.sharding != "none" else alone | {"target.sharding": "fully_shard"}
    if cut and processes > 1:
        yield cut
    if not target.offload:
        yield cut | {"target.offload": True}


def _flags(change: Mapping[str, Any]) -> str:
    return " ".join(f"--{path} {str(value).lower()}" for path, value in change.items())


def _with(recipe: Recipe, change: Mapping[str, Any]) -> Recipe:
    """The recipe with other values."""
    for path, value in change.items():
        section, name = path.split(".")
        changed = getattr(recipe, section).model_copy(update={name: value})
        recipe = recipe.model_copy(update={section: changed})
    return recipe
