"""Methods that need no training, in turn with plain decoding on every prompt: acceptance, speed, a draft's cost.

Seconds are those of one round: a second one would ask a memory of earlier answers for what it has just seen. Read
next: `../suffix.py`, by how much a text repeats.

Shapes: R prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from draftsmith.benchmarks.common.acceptance import Sums, as_figure, mean, sums_of
from draftsmith.benchmarks.common.records import Cell
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.measure.metrics import ratio
from draftsmith.eval.measure.rounds import AllRounds, speed_interval

Prompts = Sequence[list[int]]
Make = Callable[[], Proposer]

WARM_UP = 8  # tokens of the decode that is not timed
FORMATS = {"tau": ".2f", "alpha": ".2f", "verified": ".1f", "speedup": ".2f", "draft_ms": ".1f", "draft_calls": ".3f"}
"""Of the cells."""


def in_turn(
    target: Backbone, makers: Mapping[str, Make], prompts: Prompts, temperature: float, max_new_tokens: int
) -> dict[str, AllRounds]:
    """Every prompt by plain decoding and by each method, one prompt after another; the first one warms up."""
    drafters = {name: make() for name, make in makers.items()}
    runs = {name: AllRounds() for name in drafters}
    common: dict[str, Any] = {"warper": Warper(temperature), "eos_ids": target.eos_ids}
    for make in makers.values():
        generate(target, make(), prompts[:1], max_new_tokens=WARM_UP, **common)
    for number, prompt in enumerate(prompts):
        common |= {"max_new_tokens": max_new_tokens, "requests": [number]}
        base = autoregressive(target, [prompt], **common)
        for name, drafter in drafters.items():
            runs[name].add(base, generate(target, drafter, [prompt], **common), first=True)
    return runs


def cells(run: AllRounds) -> dict[str, Cell]:
    """Acceptance, what a call verifies, the speed-up, and a draft's milliseconds and target calls."""
    sums: Sums = {
        **sums_of([[each] for each in run.counts]),
        "nodes": [each.nodes for each in run.generations],
        "calls": [each.target_calls for each in run.generations],
    }
    return {
        **{name: mean([sums], name) for name in ("tau", "alpha", "verified")},
        "speedup": as_figure([speed_interval(run, 0)]),
        "draft_ms": 1e3 * run.propose_seconds / max(1, run.target_calls),
        "draft_calls": as_figure([draft_calls(run)]),
    }


def draft_calls(run: AllRounds) -> Any:
    """Seconds of a draft over those of a one-token call of plain decoding, which ran in turn with it."""
    base_R, tokens_R = np.array(run.baseline_seconds_G), np.array(run.baseline_tokens_G, float)
    draft_R = np.array([each.propose_seconds / max(1, each.target_calls) for each in run.generations])
    return ratio(draft_R * tokens_R, base_R)
