"""What a recipe that does not fit a described machine would have to change: the fewest values, then more devices.

Each change keeps what is learnt: it spreads, divides or repeats work, and rounds no weight. Read next: `memory.py`,
the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ..recipe.model import Recipe
from .devices import devices_of, in_units
from .engine import needs_whole
from .memory import fits, held_bytes, needs
from .spread import by_host

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

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
