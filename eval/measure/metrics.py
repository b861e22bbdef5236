"""The measures of acceptance, each a ratio of sums over requests, with bootstrap intervals.

Definitions are those of docs/design.md, section 4. A step counts if it begins so far before the
length limit that the limit cannot cut it, whatever it then accepts; the others are counted apart and
enter no measure (`StepLog.counted_TB`).

How degenerate a target's own text is stands beside them: any draft agrees with a target that writes "the the the", so
its tau means nothing.

Read next: `evaluate.py`.

Shapes: R requests, T steps, B rows (of a bootstrap: draws), D depths, S sets.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ...data.loops import in_loop
from ...decoding.steps import StepLog

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """Sums of one request over the steps that count."""

    steps: int
    emitted: int
    truncated: int
    """Steps that do not: they began so close to the length limit that it may have cut them."""
    tested_D: Floats
    passed_D: Floats
    alpha_hat_D: Floats


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def to_list(self) -> list[float | None]:
        """[value, low, high]; what cannot be computed is null, never NaN."""
        return [None if np.isnan(x) else float(x) for x in (self.value, self.low, self.high)]


def counts_of(log: StepLog) -> list[Counts]:
    """One `Counts` per row of a batch."""
    counted_TB, running_TB, kept_TB = log.counted_TB, log.running_TB, log.kept_TB
    tested_TBD, passed_TBD, alpha_TBD = log.tested_TBD, log.passed_TBD, log.alpha_hat_TBD
    rows = []
    for row in range(log.rows):
        use_T = counted_TB[:, row]
        tested_TD = tested_TBD[use_T, row]
        rows.append(
            Counts(
                steps=int(use_T.sum()),
                emitted=int(kept_TB[use_T, row].sum()),
                truncated=int((running_TB[:, row] & ~use_T).sum()),
                tested_D=tested_TD.sum(0).astype(float),
                passed_D=(passed_TBD[use_T, row] & tested_TD).sum(0).astype(float),
                alpha_hat_D=(alpha_TBD[use_T, row] * tested_TD).sum(0, dtype=np.float64),
            )
        )
    return rows


def tau(logs: Iterable[StepLog]) -> float:
    """Tokens per target call over all requests, bonus included; NaN where no step counts."""
    counts = [each for log in logs for each in counts_of(log)]
    steps = sum(each.steps for each in counts)
    return sum(each.emitted for each in counts) / steps if steps else float("nan")


@dataclass(frozen=True)
class Acceptance:
    """All measures of acceptance of a set of requests."""

    tau: Interval
    tau_macro: Interval
    alpha: Interval
    alpha_hat: Interval
    n_alpha: list[Interval]
    n_alpha_counts: list[int]
    steps: int
    truncated_steps: int


def acceptance(counts: Sequence[Counts], *, seed: int = 0) -> Acceptance:
    """Measure a set of requests; intervals resample whole requests."""
    steps_R = np.array([each.steps for each in counts], dtype=float)
    emitted_R = np.array([each.emitted for each in counts], dtype=float)
    tested_RD = np.stack([each.tested_D for each in counts])
    passed_RD = np.stack([each.passed_D for each in counts])
    alpha_RD = np.stack([each.alpha_hat_D for each in counts])
    some = steps_R > 0
    own_tau_R = emitted_R[some] / steps_R[some]
    return Acceptance(
        tau=ratio(emitted_R, steps_R, seed=seed),
        tau_macro=ratio(own_tau_R, np.ones_like(own_tau_R), seed=seed),
        alpha=ratio(passed_RD.sum(1), tested_RD.sum(1), seed=seed),
        alpha_hat=ratio(alpha_RD.sum(1), tested_RD.sum(1), seed=seed),
        n_alpha=[ratio(passed_RD[:, d], tested_RD[:, d], seed=seed) for d in range(tested_RD.shape[1])],
        n_alpha_counts=tested_RD.sum(0).astype(int).tolist(),
        steps=int(steps_R.sum()),
        truncated_steps=sum(each.truncated for each in counts),
    )


def acceptance_fields(measured: Acceptance) -> dict[str, Any]:
    """The measures of acceptance under their names in `results.json`."""
    return {
        "tau": measured.tau.to_list(),
        "tau_macro": measured.tau_macro.to_list(),
        "alpha": measured.alpha.to_list(),
        "alpha_hat": measured.alpha_hat.to_list(),
        "n_alpha": [each.to_list() for each in measured.n_alpha],
        "n_alpha_counts": measured.n_alpha_counts,
        "steps": measured.steps,
        "truncated_steps": measured.truncated_steps,
    }


def ratio(top_R: Floats, bottom_R: Floats, *, seed: int = 0, resamples: int = 2000, level: float = 0.95) -> Interval:
    """sum(top) / sum(bottom) with the percentile bootstrap over requests (Efron 1979), at a confidence `level`."""
    total = bottom_R.sum() if len(bottom_R) else 0.0
    if total == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    value = float(top_R.sum() / total)
    if len(top_R) < 2:
        return Interval(value, float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    bounds = _resampled(
        (top_R, bottom_R), _quotient, rng, n_resamples=resamples, confidence_level=level
    ).confidence_interval
    return Interval(value, float(bounds.low), float(bounds.high))


def tau_gain(one: Sequence[Counts], other: Sequence[Counts], *, seed: int = 0) -> Interval:
    """tau of `one` less that of `other`, with its 95 % interval: the same requests, resampled together."""
    sums = [np.array([(each.emitted, each.steps) for each in counts], float).T for counts in (one, other)]
    unknown = float("nan")
    if not all(steps_R.sum() for _, steps_R in sums):
        return Interval(unknown, unknown, unknown)

    def gain(own: Floats, own_steps: Floats, others: Floats, others_steps: Floats, axis: int = -1) -> Floats:
        return _quotient(own, own_steps, axis) - _quotient(others, others_steps, axis)

    parts = (*sums[0], *sums[1])
    value = float(gain(*parts))
    if len(one) < 2:
        return Interval(value, unknown, unknown)
    low, high = _resampled(parts, gain, np.random.default_rng(seed), n_resamples=2000).confidence_interval
    return Interval(value, float(low), float(high))


def mean_of_ratios(sets: Sequence[tuple[Floats, Floats]], *, seed: int = 0, resamples: int = 2000) -> Interval:
    """The mean over sets of sum(top) / sum(bottom), each counting alike, with its 95 % interval.

    Requests are resampled within their set (Efron and Tibshirani 1993, stratified), for the sets are fixed: an
    interval says nothing of other sets. None where a set's ratio is not known.
    """
    if not all(bottom_R.sum() for _, bottom_R in sets):
        return Interval(float("nan"), float("nan"), float("nan"))
    value = float(np.mean([top_R.sum() / bottom_R.sum() for top_R, bottom_R in sets]))
    if any(len(top_R) < 2 for top_R, _ in sets):
        return Interval(value, float("nan"), float("nan"))
    # streams of their own, or sets of one size would be resampled alike
    streams = np.random.default_rng(seed).spawn(len(sets))
    drawn_SB = [
        _resampled((top_R, bottom_R), _quotient, rng, n_resamples=resamples).bootstrap_distribution
        for (top_R, bottom_R), rng in zip(sets, streams, strict=True)
    ]
    low, high = np.percentile(np.mean(drawn_SB, axis=0), [2.5, 97.5])
    return Interval(value, float(low), float(high))


def _quotient(top: Floats, bottom: Floats, axis: int = -1) -> Floats:
    """sum(top) / sum(bottom); NaN where there is nothing to divide by."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(top.sum(axis) / bottom.sum(axis))


def _resampled(parts: Sequence[Floats], statistic: Callable[..., Floats], rng: np.random.Generator, **how: Any) -> Any:
    """The percentile bootstrap of a statistic of some numbers of each request."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        return stats.bootstrap(parts, statistic, paired=True, method="percentile", rng=rng, **how)


LOOP_LIMIT = 0.5
DISTINCT_LIMIT = 0.25


@dataclass(frozen=True)
class Degeneracy:
    """Measures over a set of texts, means over tokens."""

    distinct_2: float
    """Different bigrams / bigrams, inside each text (Li et al. 2016)."""
    loop_share: float
    """Share of tokens inside a stretch that repeats a period of up to 16 tokens 3 times."""

    @property
    def flagged(self) -> bool:
        """Whether tau on such text cannot be believed."""
        return self.loop_share > LOOP_LIMIT or self.distinct_2 < DISTINCT_LIMIT


def degeneracy(texts: Sequence[Sequence[int]]) -> Degeneracy:
    """Measure token sequences, as written by the target alone."""
    bigrams = distinct = looped = tokens = 0
    for text in texts:
        pairs = list(zip(text, text[1:]))
        bigrams += len(pairs)
        distinct += len(set(pairs))
        looped += sum(in_loop(text))
        tokens += len(text)
    return Degeneracy(distinct / bigrams if bigrams else 1.0, looped / tokens if tokens else 0.0)
