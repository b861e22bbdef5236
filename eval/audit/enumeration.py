"""Proof 1: on a tiny vocabulary, the distribution of whole emitted sequences against the exact one.

The real engine, proposer and rule decode many sequences at once with models that are tables, on the
device of the pair. All distributions are known in closed form, so the count of every possible sequence
of four tokens (of a deep draft six) has an exact expectation. Several speculative steps make up a
sequence: numbers reused from step to step, or a wrong token between steps, show in the joint
distribution alone.
Read next: `toys.py`, `power.py`, `rosenblatt.py`.

Shapes: B sequences, V vocabulary, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ...decoding.engine import generate
from ...decoding.proposal import Proposer
from ...decoding.random import SharedStream
from ...decoding.rules.acceptance import Rule
from ...decoding.sampling import Warper
from .power import detectable_total_variation
from .toy_models.table import TableModel
from .toys import PROMPT

_BLOCK = 100_000
# cells that are expected to hold fewer sequences are counted as one
_LEAST = 5.0


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
    length: int = 4,
    prompt: Sequence[int] = PROMPT,
) -> Enumeration:
    """Decode `sequences` sequences with the real engine and test the joint counts.

    Args:
        make_proposer: a fresh proposer for each block of sequences.
        rule: as the engine takes it; None for the lossless one.
        level: of the test, for the stated power.
        length: tokens of a sequence.
        prompt: what stands in front of every sequence.
    """
    V = target.vocabulary
    counts = np.zeros(V**length, dtype=np.int64)
    for block, first in enumerate(range(0, sequences, _BLOCK)):
        rows = min(_BLOCK, sequences - first)
        done = generate(
            target.as_backbone(),
            make_proposer(),
            [prompt] * rows,
            warper=warper,
            max_new_tokens=length,
            rule=rule,
            graphs=False,  # planted rules decide as they like, and sequences are short
            uniforms=SharedStream(seed * 1_000_003 + block, rows, target.device),
        )
        counts += _count(np.array(done.tokens), V)
    distribution = _exact_distribution(warper(target.logits_VV).double().cpu().numpy(), prompt[-1], length)
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
    """Chi-square over the possible sequences, rare ones together; a single impossible one settles it."""
    if counts[~possible].any():
        return float("inf"), 0.0
    if possible.sum() == 1:
        return 0.0, 1.0
    observed, expected = counts[possible], distribution[possible] * counts.sum()
    few = expected < _LEAST
    if few.sum() > 1 and few.sum() < len(few):
        observed, expected = (np.append(each[~few], each[few].sum()) for each in (observed, expected))
    test = stats.chisquare(observed, expected)
    return float(test.statistic), float(test.pvalue)


def _expected_distance(distribution: NDArray[np.float64], sequences: int) -> float:
    """Mean total variation of exact counts from their distribution: half of E|N(0, p(1-p)/n)| summed."""
    deviations = np.sqrt(distribution * (1 - distribution) / sequences)
    return float(0.5 * np.sqrt(2 / np.pi) * deviations.sum())


def _count(tokens_BL: NDArray[np.int64], V: int) -> NDArray[np.int64]:
    L = tokens_BL.shape[1]
    place_L = V ** np.arange(L - 1, -1, -1)
    return np.bincount((tokens_BL * place_L).sum(1), minlength=V**L)


def _exact_distribution(p_VV: NDArray[np.float64], last: int, length: int) -> NDArray[np.float64]:
    """Probability of every sequence of that many tokens behind the prompt's last one."""
    p_VV = p_VV / p_VV.sum(1, keepdims=True)
    V = len(p_VV)
    distribution = p_VV[last]
    for _ in range(length - 1):
        distribution = (distribution.reshape(-1, V)[:, :, None] * p_VV[None]).reshape(-1)
    return distribution / distribution.sum()
