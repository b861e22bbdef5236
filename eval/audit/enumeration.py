"""Proof 1: on a tiny vocabulary, the distribution of whole emitted sequences against the exact one.

The real engine, proposer and rule decode many sequences at once with models that are tables. All
distributions are known in closed form, so the count of every possible sequence of four tokens has an exact
expectation. Several speculative steps make up a sequence: numbers reused from step to step, or a
wrong token between steps, show in the joint distribution alone.
Read next: `miniature.py`, `power.py`, `rosenblatt.py`.

Shapes: B sequences, V vocabulary, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ...decoding.engine import generate
from ...decoding.proposal import Proposer
from ...decoding.random import SharedStream
from ...decoding.rules.acceptance import Rule
from ...decoding.sampling import Warper
from .miniature import PROMPT, VOCABULARY, TableModel
from .power import detectable_total_variation

L = 4
_BLOCK = 100_000
_V = VOCABULARY


@dataclass(frozen=True)
class Enumeration:
    """Counts of sequences against their exact distribution."""

    sequences: int
    cells: int
    statistic: float
    p_value: float
    total_variation: float
    """Measured distance, sampling noise included."""
    noise: float
    """What that distance is expected to be for an exact decoder."""
    detectable: float


def enumerate_decoding(
    target: TableModel,
    make_proposer: Callable[[], Proposer],
    *,
    rule: Rule | str | None,
    sequences: int,
    warper: Warper,
    seed: int,
    level: float,
) -> Enumeration:
    """Decode `sequences` sequences with the real engine and test the joint counts.

    Args:
        make_proposer: a fresh proposer for each block of sequences.
        rule: as the engine takes it; None for the lossless one.
        level: of the test, for the stated power.
    """
    counts = np.zeros(_V**L, dtype=np.int64)
    for block, first in enumerate(range(0, sequences, _BLOCK)):
        rows = min(_BLOCK, sequences - first)
        done = generate(
            target.as_backbone(),
            make_proposer(),
            [PROMPT] * rows,
            warper=warper,
            max_new_tokens=L,
            rule=rule,
            uniforms=SharedStream(seed * 1_000_003 + block, rows),
        )
        counts += _count(np.array(done.tokens))
    distribution = _exact_distribution(warper(target.logits_VV).double().numpy())
    possible = distribution > 0
    cells = int(possible.sum())
    statistic, p_value = _test(counts, distribution, possible)
    share = counts / sequences
    return Enumeration(
        sequences,
        cells,
        statistic,
        p_value,
        float(0.5 * np.abs(share - distribution).sum()),
        _expected_distance(distribution, sequences),
        detectable_total_variation(max(cells, 2), sequences, level),
    )


def _test(
    counts: NDArray[np.int64], distribution: NDArray[np.float64], possible: NDArray[np.bool_]
) -> tuple[float, float]:
    """Chi-square over the possible sequences; a single impossible one settles it."""
    if counts[~possible].any():
        return float("inf"), 0.0
    if possible.sum() == 1:
        return 0.0, 1.0
    found = stats.chisquare(counts[possible], distribution[possible] * counts.sum())
    return float(found.statistic), float(found.pvalue)


def _expected_distance(distribution: NDArray[np.float64], sequences: int) -> float:
    """Mean total variation of exact counts from their distribution: half of E|N(0, p(1-p)/n)| summed."""
    deviations = np.sqrt(distribution * (1 - distribution) / sequences)
    return float(0.5 * np.sqrt(2 / np.pi) * deviations.sum())


def _count(tokens_BL: NDArray[np.int64]) -> NDArray[np.int64]:
    place_L = _V ** np.arange(L - 1, -1, -1)
    return np.bincount((tokens_BL * place_L).sum(1), minlength=_V**L)


def _exact_distribution(p_VV: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probability of every sequence of L tokens behind the prompt."""
    p_VV = p_VV / p_VV.sum(1, keepdims=True)
    distribution = p_VV[PROMPT[-1]]
    for _ in range(L - 1):
        distribution = (distribution.reshape(-1, _V)[:, :, None] * p_VV[None]).reshape(-1)
    return distribution / distribution.sum()
