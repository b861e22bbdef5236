"""What a recipe that does not fit a described machine would have to change: the fewest values, then more devices.

Each change keeps what is learnt: it spreads or divides work, and rounds no weight. Read next: `memory.py`, the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ..recipe.model import Recipe
from .engine import needs_whole
from .memory import devices_of, fits, in_units, needs

if TYPE_CHECKING:
    from torch import nn

_MOST = 1024  # devices


def nearest_change(recipe: Recipe, student: nn.Module, target: nn.Module | None) -> str | None:
    """The fewest values that make room on the described machine, or on the smallest one that is larger; or None."""
    if recipe.machine.processes is None:
        return None
    processes = recipe.machine.processes
    while processes <= _MOST:
        for change in _changes(recipe, processes):
            changed = _with(recipe, change)
            devices, need = devices_of(changed), needs(changed, student, target)
            if fits(need, devices):
                flags = " ".join(f"--{path} {value}" for path, value in change.items())
                total = in_units(sum(need.values()))
                return f"The nearest change that fits is {flags}: about {total} on each of {devices}"
        processes *= 2
    return None


def _changes(recipe: Recipe, processes: int) -> Iterator[dict[str, Any]]:
    """Sets of values by dotted path, the smaller first; only those whose batch can be divided."""
    loop, machine = recipe.loop, recipe.machine
    single: dict[str, Any] = {}
    if machine.sharding == "none" and recipe.optimizer.name == "adamw":
        single["machine.sharding"] = "zero2"
    if loop.micro_rows > 1:
        single["loop.micro_rows"] = 1
    held = recipe.record.has_target and not recipe.target.is_shared and recipe.features.source != "engine"
    if held and processes > 1 and needs_whole(recipe) is None:
        single["target.sharding"] = "fully_shard"
    more = {"machine.processes": processes} if processes != machine.processes else {}
    for count in range(len(single) + 1):
        for paths in combinations(single, count):
            change = more | {path: single[path] for path in paths}
            micro = change.get("loop.micro_rows", loop.micro_rows)
            groups, left = divmod(processes, loop.context_parallel)
            if change and not left and loop.batch_rows % (groups * micro) == 0:
                yield change


def _with(recipe: Recipe, change: Mapping[str, Any]) -> Recipe:
    """The recipe with other values."""
    for path, value in change.items():
        section, name = path.split(".")
        changed = getattr(recipe, section).model_copy(update={name: value})
        recipe = recipe.model_copy(update={section: changed})
    return recipe
