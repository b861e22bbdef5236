"""Rounds of decoding: the baseline and every arm in turn on each batch, and the speed that follows.

Read next: `metrics.py`, acceptance; `evaluate.py`, which makes rows of results of it.

Shapes: G batches of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import compress
from typing import Any

import numpy as np

from ...bars import live
from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import Generation, autoregressive, generate
from ...decoding.sampling import Warper
from ..config import EvalConfig
from .arms import Arm
from .metrics import Counts, Floats, Interval, counts_of, ratio
from .requests import Request, batches
from .timing import nothing_to_collect


@dataclass
class AllRounds:
    """All requests decoded once per arm and repeat."""

    counts: list[Counts] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    seconds_G: list[float] = field(default_factory=list)
    baseline_seconds_G: list[float] = field(default_factory=list)
    tokens_G: list[float] = field(default_factory=list)
    baseline_tokens_G: list[float] = field(default_factory=list)
    prefills_G: list[float] = field(default_factory=list)
    """Seconds of both sides' prefills; of all repeats, as everything of a batch."""
    baseline_prefills_G: list[float] = field(default_factory=list)
    step_costs: list[float] = field(default_factory=list)
    """Of every batch and repeat: a step of ours / the step of plain decoding that ran in turn with it."""
    prefill_seconds: float = 0.0
    propose_seconds: float = 0.0
    target_calls: int = 0
    baseline_calls: int = 0
    nodes: int = 0
    differing: int = 0
    baseline_texts: list[list[int]] = field(default_factory=list)

    def add(self, base: Generation, own: Generation, *, first: bool) -> None:
        """Take in a batch decoded by both; `first` says that it is not a repeat of the batch before.

        An answer's first token comes from the prefill, timed apart. Repeats are summed up per batch:
        they share its texts, and resampled as units of their own they would make intervals too narrow.
        """
        if own.target_calls and base.decode_seconds:
            plain = base.decode_seconds / base.target_calls
            self.step_costs.append(own.decode_seconds / own.target_calls / plain)
        self.propose_seconds += own.propose_seconds
        self.target_calls += own.target_calls
        self.baseline_calls += base.target_calls
        self.nodes += own.nodes
        amounts: tuple[tuple[list[float], float], ...] = (
            (self.seconds_G, own.decode_seconds),
            (self.baseline_seconds_G, base.decode_seconds),
            (self.tokens_G, sum(len(t) - 1 for t in own.tokens)),
            (self.baseline_tokens_G, sum(len(t) - 1 for t in base.tokens)),
            (self.prefills_G, own.prefill_seconds),
            (self.baseline_prefills_G, base.prefill_seconds),
        )
        for sums_G, amount in amounts:
            if first:
                sums_G.append(amount)
            else:
                sums_G[-1] += amount
        if first:
            self.counts += counts_of(own.steps)
            self.generations.append(own)
            self.baseline_texts += base.tokens
            self.differing += sum(a != b for a, b in zip(own.tokens, base.tokens, strict=True))
            self.prefill_seconds += own.prefill_seconds

    def extend(self, later: AllRounds) -> None:
        """Take in what other requests gave."""
        for own in fields(self):
            setattr(self, own.name, getattr(self, own.name) + getattr(later, own.name))

    @property
    def mean_nodes(self) -> float:
        """Tokens of a verify call, the root included."""
        return self.nodes / max(1, self.target_calls)

    @property
    def proposing_cost(self) -> float:
        """Time of proposing once / time of a step of plain decoding, which ran in turn with it.

        Over a call that was timed apart it would also say how much faster or slower the machine was then.
        """
        step_seconds = sum(self.baseline_seconds_G) / max(1, self.baseline_calls)
        return self.propose_seconds / max(1, self.target_calls) / step_seconds if step_seconds else 0.0


def decode(
    target: Backbone,
    arms: Sequence[tuple[Arm, int | None]],
    requests: Sequence[Request],
    config: EvalConfig,
    temperature: float,
) -> list[AllRounds]:
    """Decode each batch with the baseline and with every arm (at its own draft length) in turn.

    Acceptance comes from the first of `repeats` rounds: the later ones draw the same numbers again.
    """
    warper = Warper.of(config, temperature)
    runs = [AllRounds() for _ in arms]
    _warm_up(target, arms, requests, config, warper)
    with nothing_to_collect():
        _decode_in_turn(target, arms, runs, requests, config, warper)
    return runs


def _decode_in_turn(
    target: Backbone,
    arms: Sequence[tuple[Arm, int | None]],
    runs: Sequence[AllRounds],
    requests: Sequence[Request],
    config: EvalConfig,
    warper: Warper,
) -> None:
    parts = batches(requests, config.batch)
    line = live(f"measuring, T = {warper.temperature:g}", len(parts), " batches")
    for part in parts:
        common: dict[str, Any] = {
            "warper": warper,
            "max_new_tokens": config.max_new_tokens,
            "eos_ids": target.eos_ids,
            "seed": config.seed,
            "requests": [each.number for each in part],
        }
        ids = [each.ids for each in part]
        for repeat in range(config.repeats):
            base = autoregressive(target, ids, **common)
            for (arm, length), run in zip(arms, runs, strict=True):
                drafter = arm.at(length).drafter
                own = generate(target, drafter, ids, rule=config.rule, **common)
                run.add(base, own, first=repeat == 0)
        line.update()
    line.close()


def _warm_up(
    target: Backbone,
    arms: Sequence[tuple[Arm, int | None]],
    requests: Sequence[Request],
    config: EvalConfig,
    warper: Warper,
) -> None:
    ids = [requests[0].ids]
    # on CUDA kernels are chosen for the shapes of a whole answer
    tokens = config.max_new_tokens if target.device.type == "cuda" else min(8, config.max_new_tokens)
    autoregressive(target, ids, warper=warper, max_new_tokens=tokens)
    for arm, length in arms:
        generate(target, arm.at(length).drafter, ids, warper=warper, max_new_tokens=tokens)


def speed_fields(run: AllRounds, seed: int) -> dict[str, Any]:
    """Speed over plain decoding under its names in `results.json`, resampled by batch."""
    own_G, base_G, tokens_G, base_tokens_G = _timed(run)
    return {
        "tokens_per_second": float(tokens_G.sum() / own_G.sum()) if own_G.sum() else None,
        "baseline_tokens_per_second": float(base_tokens_G.sum() / base_G.sum()) if base_G.sum() else None,
        "speedup": speed_interval(run, seed).to_list(),
        "prefill_seconds": run.prefill_seconds,
    }


def speed_interval(run: AllRounds, seed: int, **how: Any) -> Interval:
    """Seconds per token of plain decoding over seconds per token of ours, resampled by batch; `how` as of `ratio`."""
    return ratio(*speed_pair(run), seed=seed, **how)


def speed_pair(run: AllRounds) -> tuple[Floats, Floats]:
    """Of each batch the seconds that plain decoding takes for as many tokens as we wrote, and ours."""
    own_G, base_G, tokens_G, base_tokens_G = _timed(run)
    return base_G * tokens_G / base_tokens_G, own_G


def of_set(run: AllRounds, requests: Sequence[Request], size: int, name: str) -> AllRounds:
    """What the requests of one set gave, of a run of all in batches of `size`."""
    mine_R = [each.prompt.set == name for each in requests]
    mine_G = [part[0].prompt.set == name for part in batches(requests, size)]
    return AllRounds(
        counts=list(compress(run.counts, mine_R)),
        baseline_texts=list(compress(run.baseline_texts, mine_R)),
        seconds_G=list(compress(run.seconds_G, mine_G)),
        baseline_seconds_G=list(compress(run.baseline_seconds_G, mine_G)),
        tokens_G=list(compress(run.tokens_G, mine_G)),
        baseline_tokens_G=list(compress(run.baseline_tokens_G, mine_G)),
    )


def _timed(run: AllRounds) -> tuple[Floats, Floats, Floats, Floats]:
    """Our seconds, plain decoding's, our tokens and its, of the batches that have something to time."""
    own_G, base_G = np.array(run.seconds_G), np.array(run.baseline_seconds_G)
    tokens_G, base_tokens_G = np.array(run.tokens_G, float), np.array(run.baseline_tokens_G, float)
    # an answer that ends with its first token has nothing to time
    some_G = (tokens_G > 0) & (base_tokens_G > 0)
    return own_G[some_G], base_G[some_G], tokens_G[some_G], base_tokens_G[some_G]
