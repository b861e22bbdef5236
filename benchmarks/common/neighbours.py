"""How many times as long one arm of an interleaved run takes as another, with its interval, and what ran beside it.

Read next: `eval/measure/timing.py`, `times_as_long`, of which this is the figure.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import numpy as np
from draftsmith.benchmarks.common.records import Figure
from scipy import stats


def times_as_long(of: Sequence[float], over: Sequence[float]) -> Figure:
    """The median over rounds of neighbours' ratios, and its percentile bootstrap over rounds (95 %)."""
    share_R = np.array(of) / np.array(over)
    value = float(np.median(share_R))
    if len(share_R) < 2 or (share_R == share_R[0]).all():  # an arm over itself
        return Figure(value=value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        made = stats.bootstrap((share_R,), np.median, n_resamples=2000, method="percentile", rng=0)
    return Figure(value=value, low=float(made.confidence_interval.low), high=float(made.confidence_interval.high))


def beside(threads: int) -> str:
    """A sentence for a record's setup where other jobs had the processor too; empty where they had not."""
    load = os.getloadavg()[0]
    if load < threads + 0.5:
        return ""
    return f" Other jobs ran beside it (load average {load:.0f}), so ratios of neighbours alone mean something."
