"""Rows of results of a server's blocks: the fields of `results.json`, and `null` where only our decoder knows.

How long a server's users wait is given in percentiles, with bootstrap intervals over requests.
Shapes: R requests, M numbers of all requests, Q percentiles, I resamples.

Read next: `measure.py`, which makes blocks; `eval/report/results.schema.json`, every field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...data.generate.server_defaults import left_on
from ...data.prompts import Prompt
from ...drafters.tuned_file import Promise
from ..config import EvalConfig
from ..measure.arms import NOT_AUDITED
from ..measure.metrics import Acceptance, Counts, Floats, Interval, acceptance, acceptance_fields, degeneracy, ratio
from ..measure.rounds import AllRounds, speed_interval
from .counters import ServerCounters, within
from .exchange import Exchange
from .measure import Block, Half, Load

_OTHERS = 1.02  # tokens that a server wrote / tokens that came here, from which on others were asking too


class Counted:
    """What counts, what is resampled, and what has to be known of it."""

    def __init__(self, halves: Sequence[Half]) -> None:
        self.notes: list[str] = []
        self._drafted = [half.counted.drafted for half in halves if half.counted is not None]
        answers = [each.acceptance for half in halves for each in half.exchanges]
        of_answers = [each for each in answers if each is not None]
        of_blocks = [None if half.counted is None else half.counted.counts() for half in halves]
        self.by_request = bool(answers) and len(of_answers) == len(answers)
        if self.by_request and not any(len(each.tested_D) for each in of_answers):
            # the answers say sums alone: a page that counts steps with a draft, by position, says more
            self.by_request = not all(
                counts is not None and len(counts.tested_D) and _ours(half)
                for half, counts in zip(halves, of_blocks, strict=True)
            )
        found = of_answers if self.by_request else [each for each in of_blocks if each is not None]
        kept = [each for half in halves for each in self._kept(half)]
        if not self.by_request and any(half.counted is None for half in halves):
            found, kept = [], []  # what some blocks counted is not what all of them did
        self.counts = _as_deep(kept if kept else found)
        self._note_source(halves)
        left = sum(each.emitted for each in found) - sum(each.emitted for each in self.counts)
        if left:
            self.notes.append(
                f"{left:,} drafts were accepted behind the end of an answer: tau leaves them out, alpha and n_alpha "
                "are as the server counts"
            )

    def _kept(self, half: Half) -> list[Counts]:
        """Of a block, its counts or those of its answers, without what is behind the ends."""
        if self.by_request:
            return [count for each in half.exchanges if (count := count_of(each)) is not None]
        counts = None if half.counted is None else half.counted.counts()
        if counts is None or half.counted is None:
            return []
        if not _ours(half):
            return [counts]
        return [within(counts, half.counted.written - len(half.exchanges))]

    def _note_source(self, halves: Sequence[Half]) -> None:
        looked = [half.counted for half in halves]
        if self.by_request:
            if self.draft_length is None:
                self.notes.append(
                    "of each answer the server says how many drafts were accepted: tau is of all calls of the target "
                    "behind the first token, those without a draft too"
                )
        elif None in looked:
            self.notes.append(
                "acceptance is not known: the server shows no counters at /metrics that are known here (vLLM's, "
                "SGLang's with --enable-metrics, llama.cpp's with --metrics), or it began anew meanwhile"
            )
        elif not self.counts:
            self.notes.append("the server counts no drafts: it does not speculate, or does not say so")
        elif (note := _others([each for each in looked if each is not None], halves)) is not None:
            self.notes.append(f"{note}: it served others too, and its counts of acceptance are of all of them")

    @property
    def unit(self) -> str | None:
        """What is resampled: whole requests, or whole blocks of them."""
        return None if not self.counts else "requests" if self.by_request else "blocks"

    @property
    def draft_length(self) -> int | None:
        """Positions of a draft; None where the server does not count by position."""
        return max((len(each.tested_D) for each in self.counts), default=0) or None

    @property
    def mean_nodes(self) -> float | None:
        """Tokens of a verify call, the root included."""
        drafted = [each for each in self._drafted if each is not None]
        steps = sum(each.steps for each in self.counts)
        return None if not steps or not drafted or self.by_request else 1 + sum(drafted) / steps


def count_of(answer: Exchange) -> Counts | None:
    """What the drafter did for one answer, without what is behind its end."""
    counts = answer.acceptance
    return counts if counts is None or not answer.counted else within(counts, answer.tokens - 1)


def _ours(half: Half) -> bool:
    """Whether all that the server counted meanwhile is of the requests of this block."""
    counted = half.counted
    if counted is None or half.refused:
        return False
    tokens_known = all(each.counted for each in half.exchanges)
    if counted.requests is None and not tokens_known:
        return False
    return counted.requests in (None, len(half.exchanges)) and (not tokens_known or counted.written == half.tokens)


def _others(looked: Sequence[ServerCounters], halves: Sequence[Half]) -> str | None:
    """By what it shows that others asked too; None where it does not. Pieces of a stream are no tokens."""
    if all(each.counted for half in halves for each in half.exchanges):
        written, tokens = sum(each.written for each in looked), sum(half.tokens for half in halves)
        return (
            f"the server wrote {written:,} tokens while {tokens:,} came here" if written > _OTHERS * tokens else None
        )
    answered = sum(each.requests or 0 for each in looked)
    asked = sum(len(half.exchanges) + len(half.refused) for half in halves)
    return f"the server answered {answered:,} requests while {asked:,} were asked here" if answered > asked else None


def _as_deep(counts: Sequence[Counts]) -> list[Counts]:
    """All with as many positions as the longest draft had: of shorter ones the others were never tested."""
    depth = max((len(each.tested_D) for each in counts), default=0)

    def deep(each_D: Floats) -> Floats:
        return np.pad(each_D, (0, depth - len(each_D)))

    return [
        replace(each, tested_D=deep(each.tested_D), passed_D=deep(each.passed_D), alpha_hat_D=deep(each.alpha_hat_D))
        for each in counts
    ]


_NOTHING: list[float | None] = [None, None, None]
_UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Subject:
    """What is measured, and what is known of it."""

    model: str
    prompts: Sequence[Prompt]
    verdict: str = NOT_AUDITED
    promise: Promise | None = None
    """Of a drafter's `tuned.json`."""
    encode: Encode | None = None
    """The target's tokenizer, if its folder was named."""


def server_rows(blocks: Sequence[Block], subject: Subject, config: EvalConfig) -> list[dict[str, Any]]:
    """A row for each temperature and load, in the order in which they were measured."""
    kinds = dict.fromkeys((each.plan.temperature, each.plan.load) for each in blocks)
    rows = []
    for temperature, load in kinds:
        mine = [each for each in blocks if (each.plan.temperature, each.plan.load) == (temperature, load)]
        rows.append(_row(mine, temperature, load, subject, config))
    return rows


def _row(
    blocks: Sequence[Block], temperature: float, load: Load, subject: Subject, config: EvalConfig
) -> dict[str, Any]:
    own = [each.own for each in blocks]
    baseline = [each.baseline for each in blocks if each.baseline is not None]
    counted = Counted(own)
    latency = latency_fields(own, config.seed)
    base = latency_fields(baseline, config.seed) if baseline else None
    length = counted.draft_length
    return {
        "method": f"{subject.model}, {load.label}",
        "temperature": temperature,
        "prompts": config.prompts,
        "requests": latency["requests"],
        "draft_length": length,
        "draft_steps": None,
        "nodes": None if length is None else length + 1,
        "mean_nodes": counted.mean_nodes,
        "rule": None,
        "verdict": subject.verdict,
        "audited": None if subject.verdict == NOT_AUDITED else f"{subject.model}, {load.label}",
        "distance": None,
        **_acceptance(counted.counts, config.seed, by_request=counted.by_request),
        "mbsu": None,
        "c": None,
        "c_v": None,
        "predicted_speedup": _predicted(subject.promise, temperature, load),
        "tokens_per_second": latency["tokens_per_second"][0],
        "baseline_tokens_per_second": None if base is None else base["tokens_per_second"][0],
        "speedup": _speedup(blocks, config.seed) if baseline else _NOTHING,
        "prefill_seconds": None,
        **_text_fields(baseline or own, subject.encode),
        "differing_rows": _differing(blocks) if baseline and temperature == 0 else None,
        "categories": _categories(own, subject, config, by_request=counted.by_request),
        "sample": [],
        "server": {
            "load": {"concurrency": load.concurrency, "rate": load.rate},
            "blocks": len(blocks),
            "counted_by": counted.unit,
            "own": latency,
            "baseline": base,
            "notes": [*counted.notes, *_told(own, baseline), *_notes(own, subject.promise, temperature, load)],
        },
    }


def _acceptance(counts: Sequence[Counts], seed: int, *, by_request: bool) -> dict[str, Any]:
    """The measures of acceptance; a server tells no distributions, and a block has no tau of its own."""
    if counts:
        fields = acceptance_fields(acceptance(counts, seed=seed))
    else:
        fields = acceptance_fields(Acceptance(_UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN, [], [], 0, 0))
    return fields | {"alpha_hat": _NOTHING} | ({} if by_request else {"tau_macro": _NOTHING})


def _categories(
    halves: Sequence[Half], subject: Subject, config: EvalConfig, *, by_request: bool
) -> list[dict[str, Any]]:
    exchanges = [each for half in halves for each in half.exchanges]
    rows = []
    for category in sorted({subject.prompts[each.prompt].category for each in exchanges}):
        mine = [each for each in exchanges if subject.prompts[each.prompt].category == category]
        counts = [count for each in mine if (count := count_of(each)) is not None] if by_request else []
        fields = _acceptance(counts, config.seed, by_request=by_request)
        rows.append({"category": category, "requests": len(mine), "verdict": subject.verdict, **fields})
    return rows


def _speedup(blocks: Sequence[Block], seed: int) -> list[float | None]:
    """Seconds that a user waits per token without speculation over those with it, resampled by block."""
    run = AllRounds()
    for each in blocks:
        if each.baseline is not None:
            run.seconds_G.append(each.own.waited)
            run.baseline_seconds_G.append(each.baseline.waited)
            run.tokens_G.append(float(each.own.tokens))
            run.baseline_tokens_G.append(float(each.baseline.tokens))
    return speed_interval(run, seed).to_list()


def _text_fields(halves: Sequence[Half], encode: Encode | None) -> dict[str, Any]:
    """Whether the target's own text loops; unknown without its tokenizer."""
    if encode is None:
        return {"distinct_2": None, "loop_share": None, "flagged": False}
    first = {each.prompt: each.text for half in halves for each in half.exchanges}
    text = degeneracy([encode(each) for each in first.values()])
    return {"distinct_2": text.distinct_2, "loop_share": text.loop_share, "flagged": text.flagged}


def _differing(blocks: Sequence[Block]) -> int:
    """Requests that the two servers answer differently at T = 0."""
    differing = 0
    for each in blocks:
        if each.baseline is not None:
            theirs = dict(zip(each.baseline.numbers, (e.text for e in each.baseline.exchanges), strict=True))
            mine = zip(each.own.numbers, each.own.exchanges, strict=True)
            differing += sum(number in theirs and theirs[number] != e.text for number, e in mine)
    return differing


def _predicted(promise: Promise | None, temperature: float, load: Load) -> float | None:
    return promise.predicted if promise is not None and promise.is_of(temperature, load.concurrency) else None


def _told(own: Sequence[Half], baseline: Sequence[Half]) -> list[str]:
    """What the servers were not told to leave off."""
    notes = []
    for whose, halves in (("", own), ("without speculation: ", baseline)):
        for off in {tuple(each.off) for each in halves if each.off is not None}:
            sentence = left_on(off)
            notes += [] if sentence is None else [f"{whose}{sentence}"]
    return notes


def _notes(own: Sequence[Half], promise: Promise | None, temperature: float, load: Load) -> list[str]:
    notes = []
    if promise is not None and not promise.is_of(temperature, load.concurrency):
        notes.append(
            f"no prediction: the drafter was tuned for T = {promise.temperature:g} and {promise.batch} at a time"
        )
    if not all(each.counted for half in own for each in half.exchanges):
        notes.append("the server does not say how many tokens an answer has: pieces of its stream are counted")
    refused = [reason for half in own for reason in half.refused]
    if refused:
        notes.append(f"{len(refused)} requests were refused, the last one with: {refused[-1]}")
    gaps = np.array([len(each.gaps) + 1 for half in own for each in half.exchanges])
    if (gaps == 1).all():
        notes.append("every answer came in one piece: the server does not stream, and the first token is the last")
    return notes


PERCENTILES = (50, 90, 99)
_RESAMPLES = 1000


def latency_fields(halves: Sequence[Half], seed: int) -> dict[str, Any]:
    """What the blocks of a load at one server took, under its names in `results.json`; times in seconds."""
    exchanges = [each for half in halves for each in half.exchanges]
    tokens_G = np.array([half.tokens for half in halves], dtype=float)
    seconds_G = np.array([half.seconds for half in halves])
    per_token = [each.per_token for each in exchanges]
    return {
        "requests": len(exchanges),
        "refused": sum(len(half.refused) for half in halves),
        "tokens": int(tokens_G.sum()),
        "tokens_per_second": ratio(tokens_G, seconds_G, seed=seed).to_list(),
        "first": percentiles([[each.first] for each in exchanges], seed),
        "per_token": percentiles([[each] for each in per_token if each is not None], seed),
        "gap": percentiles([each.gaps for each in exchanges], seed),
        "whole": percentiles([[each.last] for each in exchanges], seed),
    }


def percentiles(numbers_R: Sequence[Sequence[float]], seed: int) -> dict[str, list[float | None]]:
    """The percentiles of all numbers, each with its 95 % interval; whole requests are resampled.

    Args:
        numbers_R: the numbers of every request, none or many.
    """
    flat_M = np.concatenate([np.asarray(each, dtype=float) for each in numbers_R] or [np.zeros(0)])
    if not len(flat_M):
        return {f"p{q}": [None, None, None] for q in PERCENTILES}
    order_M = flat_M.argsort(kind="stable")
    of_M = np.repeat(np.arange(len(numbers_R)), [len(each) for each in numbers_R])[order_M]
    sorted_M = flat_M[order_M]
    values_Q = _at(sorted_M, np.ones(len(sorted_M)))
    rng = np.random.default_rng(seed)
    drawn_IQ: list[Floats] = []
    while len(numbers_R) > 1 and len(drawn_IQ) < _RESAMPLES:
        times_R = np.bincount(rng.integers(len(numbers_R), size=len(numbers_R)), minlength=len(numbers_R))
        if (weight_M := times_R[of_M].astype(float)).any():
            drawn_IQ.append(_at(sorted_M, weight_M))
    if not drawn_IQ:
        return {f"p{q}": [float(value), None, None] for q, value in zip(PERCENTILES, values_Q, strict=True)}
    low_Q, high_Q = np.percentile(np.stack(drawn_IQ), [2.5, 97.5], axis=0)
    return {
        f"p{q}": [float(value), float(low), float(high)]
        for q, value, low, high in zip(PERCENTILES, values_Q, low_Q, high_Q, strict=True)
    }


def _at(sorted_M: Floats, weight_M: Floats) -> Floats:
    """The smallest number that so many per cent of the weight do not exceed, for every percentile."""
    share_M = weight_M.cumsum() / weight_M.sum()
    at_Q = np.searchsorted(share_M, np.array(PERCENTILES) / 100 - 1e-12)
    return sorted_M[np.minimum(at_Q, len(sorted_M) - 1)]
