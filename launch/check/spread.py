"""What it takes to have a target lie over several processes: what each pass exchanges, and what the hosts keep.

Both ways of cutting it are weighed by the same rule: bytes that a process is sent for one pass of all rows. Read
next: `memory.py`, what a device holds; `decoding/backbone/cut.py`, the two ways.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..recipe.model import Recipe
from .activations import BYTES
from .devices import Devices, devices_of, in_units
from .memory import layer_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
