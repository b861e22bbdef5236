"""Acceptance of drafters of one kind, one a training seed, on the same prompts.

What a prompt adds to a ratio is kept per prompt and seed. A figure is the mean over seeds of the
ratio over prompts; its interval resamples prompts, the same ones for every seed, and so says
nothing about training: the seeds' own figures stand beside it. Read next: `records.py`.

Shapes: R prompts, D depths.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
from draftsmith.benchmarks.common.records import Figure
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import generate
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.audit.audit import AuditReport, audit
from draftsmith.eval.audit.enumeration import Enumeration
from draftsmith.eval.config import AuditConfig, EvalConfig
from draftsmith.eval.measure.metrics import Counts, Floats, Interval, counts_of, ratio

Pair = tuple[Floats, Floats]
"""What is summed above and below the line, [R] each."""
Sums = dict[str, list[Any]]
"""Of one drafter at one temperature, by name, for every prompt; as it is kept in a file."""

PAIRS = {"tau": ("emitted", "steps"), "alpha": ("passed", "tested"), "alpha_hat": ("alpha_hat", "tested")}
PAIRS |= {"verified": ("nodes", "calls")}


def decoded(
    target: Backbone,
    drafter: Proposer,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    *,
    max_new_tokens: int,
    batch: int = 64,
    draws: int = 1,
    seed: int = 0,
) -> Sums:
    """Sums of every prompt, decoded `draws` times with random numbers of its own each time."""
    rows = [list(prompt) for prompt in prompts for _ in range(draws)]
    counts: list[Counts] = []
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        done = generate(
            target,
            drafter,
            part,
            warper=Warper(temperature),
            max_new_tokens=max_new_tokens,
            eos_ids=target.eos_ids,
            seed=seed,
            requests=range(first, first + len(part)),
        )
        counts += counts_of(done.steps)
    return sums_of([counts[at : at + draws] for at in range(0, len(counts), draws)])


def at_temperatures(
    target: Backbone, drafter: Proposer, prompts: Sequence[Sequence[int]], config: EvalConfig, *, draws: int = 1
) -> dict[str, Sums]:
    """The same by temperature; above 0 each prompt is decoded `draws` times."""
    return {
        f"{temperature:g}": decoded(
            target,
            drafter,
            prompts,
            temperature,
            max_new_tokens=config.max_new_tokens,
            draws=draws if temperature else 1,
            seed=config.seed,
        )
        for temperature in config.temperatures
    }


def sums_of(counts: Sequence[Sequence[Counts]]) -> Sums:
    """Sums over the decodes of each prompt."""
    return {
        "emitted": [sum(each.emitted for each in own) for own in counts],
        "steps": [sum(each.steps for each in own) for own in counts],
        "tested": [sum(float(each.tested_D.sum()) for each in own) for own in counts],
        "passed": [sum(float(each.passed_D.sum()) for each in own) for own in counts],
        "alpha_hat": [sum(float(each.alpha_hat_D.sum()) for each in own) for own in counts],
        "tested_by_depth": [sum(each.tested_D for each in own).tolist() for own in counts],  # type: ignore[union-attr]
        "passed_by_depth": [sum(each.passed_D for each in own).tolist() for own in counts],  # type: ignore[union-attr]
    }


def pair(sums: Sums, name: str) -> Pair:
    """A measure's sums, [R] each."""
    top, bottom = PAIRS.get(name, (f"{name} above", f"{name} below"))
    return np.array(sums[top], float), np.array(sums[bottom], float)


def mean(parts: Sequence[Sums], name: str) -> Figure | None:
    """A measure over the seeds, one part each; None where no step of a seed counts."""
    return over_seeds([pair(part, name) for part in parts])


def gain(mine: Sequence[Sums], other: Sequence[Sums], name: str) -> Figure | None:
    """Mine less the other's, seed by seed and prompt by prompt."""
    return gain_over_seeds([pair(part, name) for part in mine], [pair(part, name) for part in other])


def first_gain(mine: Sequence[Sums], other: Sequence[Sums]) -> Figure | None:
    """How much more often the first draft is accepted, mine less the other's, as `gain`."""

    def firsts(side: Sequence[Sums]) -> list[Pair]:
        return [(np.array(part["passed_by_depth"])[:, 0], np.array(part["tested_by_depth"])[:, 0]) for part in side]

    return gain_over_seeds(firsts(mine), firsts(other))


def n_alpha(parts: Sequence[Sums]) -> list[float]:
    """Accepted by depth, given that all shallower ones were; the mean over seeds."""
    with np.errstate(invalid="ignore"):
        shares = [np.sum(part["passed_by_depth"], 0) / np.sum(part["tested_by_depth"], 0) for part in parts]
    return [float(share) for share in np.nan_to_num(np.mean(shares, 0))]


def over_seeds(pairs: Sequence[Pair], *, resamples: int = 2000) -> Figure | None:
    """The mean over seeds of sum(top) / sum(bottom), with its interval over prompts."""
    if len(pairs) == 1:
        return as_figure([ratio(*pairs[0], resamples=resamples)])
    empty = np.zeros_like(pairs[0][0]), np.ones_like(pairs[0][1])
    return gain_over_seeds(pairs, [empty] * len(pairs), resamples=resamples)


def gain_over_seeds(
    mine: Sequence[Pair], other: Sequence[Pair], *, seed: int = 0, resamples: int = 2000
) -> Figure | None:
    """The mean over seeds of a paired difference, with its interval over prompts."""
    top_SR, bottom_SR, top_less_SR, bottom_less_SR = (
        np.array([each[at] for each in side], float) for side in (mine, other) for at in (0, 1)
    )
    rows = top_SR.shape[1]
    drawn_XR = np.random.default_rng(seed).integers(rows, size=(resamples, rows))

    def by_seed(chosen: Any) -> Floats:
        sums = (each[:, chosen].sum(-1) for each in (top_SR, bottom_SR, top_less_SR, bottom_less_SR))
        a, b, c, d = sums
        combined: Floats = a / b - c / d
        return combined

    with np.errstate(invalid="ignore", divide="ignore"):  # a draw may be of empty prompts alone
        values = by_seed(np.arange(rows))
        if np.isnan(values).any():
            return None
        low, high = np.nanpercentile(by_seed(drawn_XR).mean(0), [2.5, 97.5])
    return as_figure([Interval(float(value), float(low), float(high)) for value in values])


def difference(mine: Pair, other: Pair, *, seed: int = 0, resamples: int = 2000) -> Interval:
    """`ratio` of mine less `ratio` of the other's on the same requests, drawn together.

    A paired bootstrap: what makes a request easy for both sides is not in the interval.
    """
    combined = gain_over_seeds([mine], [other], seed=seed, resamples=resamples)
    if combined is None:
        return Interval(np.nan, np.nan, np.nan)
    return Interval(combined.value, *(np.nan if end is None else end for end in (combined.low, combined.high)))


def as_figure(intervals: Sequence[Interval]) -> Figure | None:
    """The seeds' mean, with the interval of the first, which is of them all; None where one has no value."""
    values = [each.value for each in intervals]
    if np.isnan(values).any():
        return None
    ends = intervals[0].to_list()[1:]
    known = {} if None in ends else {"low": ends[0], "high": ends[1]}
    seeds = {"seeds": values} if len(values) > 1 else {}
    return Figure.model_validate({"value": float(np.mean(values)), **known, **seeds})


def audited(
    target: Backbone,
    drafter: Proposer,
    prompts: Sequence[Sequence[int]],
    args: Namespace,
    *,
    at_most: int = 24,
    temperature: float | None = None,
    enumerated: Enumeration | None = None,
) -> AuditReport:
    """The audit with the evidence that a script's arguments ask for; `enumerated` as of `audit`."""
    at = {} if temperature is None else {"temperature": temperature}
    evidence = AuditConfig.model_validate(
        {"tokens": args.audit_tokens, "sequences": args.audit_sequences, "prompts": min(at_most, len(prompts)), **at}
    )
    return audit(target, drafter, prompts, evidence, enumerated=enumerated)
