"""Calls timed in turns, on a CPU by its clock and on a CUDA device by its own events.

Read next: `speed.py`.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ...decoding.graphs import RecordedUniforms, Recordings, Replayed
from ...decoding.random import Uniforms

Call = Callable[[], object]
_MOSTLY_REPLAYED = 128
"""Tokens of an answer of which the first steps, launched one by one, are few."""


def recorded(call: Call, device: torch.device, *, insists: bool = True) -> Call:
    """A call as the engine replays its steps, already recorded; the call itself without CUDA.

    `insists`: one that waits for the device is an error; else it stays as it is, which is said once.
    """
    if device.type != "cuda":
        return call
    replayed = Replayed(call, RecordedUniforms(Uniforms(0, [0], device)), Recordings(insists=insists))
    for _ in range(3):  # two eager calls, then the recording
        replayed()
    return replayed


def enough_tokens(few: int, device: torch.device) -> int:
    """Tokens of an answer that tells what a step takes: `few`, but on CUDA, where most are to be replayed."""
    return max(few, _MOSTLY_REPLAYED) if device.type == "cuda" else few


@contextmanager
def nothing_to_collect() -> Iterator[None]:
    """Python's garbage is collected before, and what there is by now is not searched for more.

    An audit leaves hundreds of thousands of objects. To search them takes far longer than a step, and whichever arm it
    happens to would have it counted as its own. A process that has frozen objects itself is left as it is: they could
    not be told from ours afterwards.
    """
    gc.collect()
    own = gc.get_freeze_count() == 0
    if own:
        gc.freeze()
    try:
        yield
    finally:
        if own:
            gc.unfreeze()


def interleaved(arms: dict[str, Call], rounds: int, *, device: torch.device, repeats: int = 1) -> dict[str, float]:
    """Median seconds of a call of each arm; the arguments are as for `turns`."""
    seconds = turns(arms, rounds, device=device, repeats=repeats)
    return {name: statistics.median(values) for name, values in seconds.items()}


def turns(
    arms: dict[str, Call],
    rounds: int,
    *,
    device: torch.device,
    repeats: int = 1,
    within: float = math.inf,
    at_least: int = 1,
) -> dict[str, list[float]]:
    """Seconds of a call in every turn of each arm; arms take turns, so a slow minute hits all.

    Args:
        rounds: turns of each arm that count; one more before them warms up.
        device: where the calls work.
        repeats: calls to a turn, back to back, so that launching one hides behind another.
        within: seconds of all turns; once they have passed no further round begins, but for `at_least`.
        at_least: rounds that are made however long they take.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    spent = 0.0
    with nothing_to_collect():
        for number in range(rounds + 1):
            if number > at_least and spent > within:
                break
            for name, call in arms.items():
                elapsed = _seconds(call, repeats, device)
                spent += elapsed
                if number:
                    seconds[name].append(elapsed / repeats)
    return seconds


def times_as_long(of: list[float], over: list[float]) -> float:
    """How many times as long one arm takes as another: the median over rounds, each of which compares neighbours.

    A ratio of two medians would compare turns of other moments, of a machine that is slower in one than in another.
    """
    return statistics.median(a / b for a, b in zip(of, over, strict=True))


def _seconds(call: Call, repeats: int, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
