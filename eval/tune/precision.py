"""Which precision a target decodes faster in on this CPU: what its calls take in the one it has and in the other.

In bf16 half as many bytes are read, which is most of what a call waits for; on a processor without instructions for
it, or for a small model that lies in the caches, fp32 is faster. So both are timed in turn: the one-token call of
plain decoding, and the verify call of the setting that was measured fastest. A precision is a target of its own: its
texts and its tau may differ, and what was tuned holds for the one it was tuned in. Read next:
`../measure/speed.py`, the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.quantised import quantisation_of
from ...decoding.devices import multiplies_bf16
from ..measure.speed import bytes_of, one_call
from ..measure.timing import times_as_long, turns

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_LEAST_BYTES = 50e6
"""Smaller weights lie in the caches, and loading them again would say nothing."""
_TURNS: dict[str, Any] = {"rounds": 20, "within": 6.0, "at_least": 3, "repeats": 2}
_TOLD_APART = 0.05


def other_precision(target: Backbone) -> str | None:
    """The `target.dtype` to compare with.

    None off a CPU, without bf16, of weights that are quantised or few, or where there is no room for a copy.
    """
    import psutil

    model, weights = target.model, bytes_of(target.model)
    comparable = target.device.type == "cpu" and model.dtype in _NAMES and quantisation_of(model.config) is None
    # fp32 beside bf16 takes twice as much again, and loading some more
    room = psutil.virtual_memory().available > 4 * weights
    if not (comparable and room and weights > _LEAST_BYTES and multiplies_bf16()):
        return None
    return "fp32" if model.dtype == torch.bfloat16 else "bf16"


@torch.inference_mode()
def compared(
    target: Backbone, load: Callable[[str], Backbone], nodes: int, text: Sequence[int], context: int
) -> str | None:
    """What calls of one and of `nodes` tokens take in both precisions, in a line; None where nothing is compared.

    Args:
        load: the same target in another `target.dtype`.
        text: ids that the calls read, behind `context` of them.
    """
    other = other_precision(target)
    if other is None:
        return None
    both = {_NAMES[target.model.dtype]: target, other: load(other)}
    pairs = [(name, size) for name in both for size in (1, nodes)]
    arms = {f"{name} {size}": one_call(both[name], size - 1, context, 1, text) for name, size in pairs}
    times = turns(arms, device=target.device, **_TURNS)
    seconds = {name: [median(times[f"{name} {size}"]) for size in (1, nodes)] for name in both}
    mine, its = (times[f"{name} {nodes}"] for name in both)
    return in_words(seconds, times_as_long(its, mine), nodes)


def in_words(seconds: Mapping[str, Sequence[float]], ratio: float, nodes: int) -> str:
    """The line.

    Args:
        seconds: of calls of one token and of `nodes`, by precision; first that which decodes.
        ratio: a call of `nodes` in the other, over one in this.
    """
    here, other = seconds
    took = " and ".join(f"{one * 1e3:.3g} / {more * 1e3:.3g} ms in {name}" for name, (one, more) in seconds.items())
    line = f"a target call of 1 / {nodes} tokens takes {took}"
    if abs(ratio - 1) < _TOLD_APART:
        return f"{line}: one is as fast as the other here"
    if ratio > 1:
        return f"{line}: {here}, which was tuned in, is faster here"
    return f"{line}: {other} is faster here; tune anew with --target.dtype {other}"
