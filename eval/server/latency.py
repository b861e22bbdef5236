"""How long a server's users wait: percentiles with bootstrap intervals over requests.

Read next: `rows.py`.

Shapes: R requests, M numbers of all requests, Q percentiles, I resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..measure.metrics import Floats, ratio
from .blocks import Half

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
