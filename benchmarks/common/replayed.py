"""A step as the engine replays it, for timing.

Read next: `eval/measure/timing.py`, which times calls in turns.
"""

from __future__ import annotations

import torch
from draftsmith.decoding.graphs import Held, Recordings, Replayed
from draftsmith.decoding.random import Uniforms
from draftsmith.eval.measure.timing import Call


def recorded(step: Call, device: torch.device) -> Call:
    """The step as the engine replays it, already recorded; the step itself without CUDA."""
    if device.type != "cuda":
        return step
    replayed = Replayed(step, Held(Uniforms(0, [0], device)), Recordings())
    for _ in range(3):  # two eager calls, then the recording
        replayed()
    return replayed
