"""The devices of a run: those at hand, or those that the recipe's `machine` describes.

Read next: `memory.py`, what each of them has to hold.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...errors import RequestError
from ..recipe.model import Recipe


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
    from ...trainers.loop.compiled import check_no_deepspeed
    from ...trainers.loop.setup import check_optimizer
    from ...trainers.loop.sharding import check_no_average
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


def in_units(count: float) -> str:
    """Bytes in the unit that fits, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
