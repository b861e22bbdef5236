"""Results by prompt set, and over all sets as papers print them: the mean over sets, each counting alike.

Read next: `metrics.py`, the interval of such a mean; `data/prompt_sets.py`, the sets.

Shapes: R requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...data.prompt_sets import chosen_sets
from ..config import EvalConfig
from .metrics import Counts, Floats, acceptance, acceptance_fields, degeneracy, mean_of_ratios
from .requests import Request, sets_of
from .rounds import AllRounds, of_set, speed_fields, speed_pair


def set_fields(requests: Sequence[Request], run: AllRounds, config: EvalConfig, verdict: str) -> dict[str, Any]:
    """`sets` and `over_sets` of a row of results; nothing where the prompts are of one set."""
    names = sets_of(requests)
    if not names:
        return {}
    sources = {each.name: each.source for each in chosen_sets(config.prompts)}
    runs = {name: of_set(run, requests, config.batch, name) for name in names}
    named = {name: (sources[name], len(own.counts), own) for name, own in runs.items()}
    return fields_by_set(named, config.seed, verdict)


def fields_by_set(runs: Mapping[str, tuple[str, int, AllRounds]], seed: int, verdict: str) -> dict[str, Any]:
    """The same of runs by their sets' names, each with its source and its turns."""
    sets = [_of_one(name, *of, seed, verdict) for name, of in runs.items()]
    flagged = any(each["flagged"] for each in sets)
    return {
        "sets": sets,
        "over_sets": {**_over_all([run for *_, run in runs.values()], seed, verdict), "flagged": flagged},
    }


def _of_one(name: str, source: str, turns: int, run: AllRounds, seed: int, verdict: str) -> dict[str, Any]:
    text, speed = degeneracy(run.baseline_texts), speed_fields(run, seed)
    return {
        "set": name,
        "source": source,
        "requests": turns,
        "verdict": verdict,
        **acceptance_fields(acceptance(run.counts, seed=seed)),
        **{key: speed[key] for key in ("tokens_per_second", "baseline_tokens_per_second", "speedup")},
        "distinct_2": text.distinct_2,
        "loop_share": text.loop_share,
        "flagged": text.flagged,
    }


def _over_all(runs: Sequence[AllRounds], seed: int, verdict: str) -> dict[str, Any]:
    return {
        "verdict": verdict,
        "tau": mean_of_ratios([_sums(run.counts, "emitted", "steps") for run in runs], seed=seed).to_list(),
        "alpha": mean_of_ratios([_sums(run.counts, "passed_D", "tested_D") for run in runs], seed=seed).to_list(),
        "speedup": mean_of_ratios([speed_pair(run) for run in runs], seed=seed).to_list(),
    }


def _sums(counts: Sequence[Counts], *names: str) -> tuple[Floats, Floats]:
    """Two of the counts of each request, over all depths."""
    top_R, bottom_R = (np.array([np.sum(getattr(each, name)) for each in counts], dtype=float) for name in names)
    return top_R, bottom_R
