"""Figures of several training seeds on the same prompts."""

from __future__ import annotations

import numpy as np
import pytest
from draftsmith.benchmarks.common.acceptance import difference, gain_over_seeds, mean, n_alpha, over_seeds
from draftsmith.eval.measure.metrics import ratio


def test_a_paired_difference_forgets_what_both_sides_share() -> None:
    """Requests differ much more than the two sides do: unpaired intervals overlap, paired do not."""
    rng = np.random.default_rng(3)
    steps_R = rng.integers(20, 40, 40).astype(float)
    easy_R = rng.uniform(1, 4, 40)
    mine, other = ((easy_R + more) * steps_R for more in (0.2, 0.0))
    found = difference((mine, steps_R), (other, steps_R))
    assert found.value == pytest.approx(0.2)
    assert [found.low, found.high] == pytest.approx([0.2, 0.2])
    assert ratio(other, steps_R).high > ratio(mine, steps_R).low
    back = difference((other, steps_R), (mine, steps_R))
    assert back.to_list() == pytest.approx([-found.value, -found.high, -found.low])


def test_the_interval_of_a_difference_covers_it() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(60):
        bottom_R = rng.integers(20, 40, 40).astype(float)
        mine, other = (rng.binomial(bottom_R.astype(int), p).astype(float) for p in (0.5, 0.4))
        found = difference((mine, bottom_R), (other, bottom_R), seed=seed, resamples=400)
        hits += found.low <= 0.1 <= found.high
    assert 50 <= hits < 60


def test_a_figure_over_seeds_is_their_mean_with_an_interval_over_prompts() -> None:
    rng = np.random.default_rng(5)
    steps_R = rng.integers(20, 40, 40).astype(float)
    tau_R = rng.uniform(1, 3, 40)
    seeds = [(tau_R * steps_R + shift * steps_R, steps_R) for shift in (0.0, 0.1, 0.5)]
    found = over_seeds(seeds)
    one = over_seeds(seeds[:1])
    assert one.seeds is None
    assert found.seeds == pytest.approx([one.value, one.value + 0.1, one.value + 0.5])
    assert found.value == pytest.approx(one.value + 0.2)
    # what a prompt adds is the same for every seed: as wide as one seed's interval, shifted
    assert [found.low, found.high] == pytest.approx([one.low + 0.2, one.high + 0.2], abs=0.05)  # type: ignore[operator]


def test_a_gain_over_seeds_pairs_prompts_and_seeds() -> None:
    rng = np.random.default_rng(6)
    steps_R = rng.integers(20, 40, 40).astype(float)
    tau_R = rng.uniform(1, 3, 40)
    mine = [((tau_R + 0.2 + seed) * steps_R, steps_R) for seed in range(3)]
    other = [((tau_R + seed) * steps_R, steps_R) for seed in range(3)]
    found = gain_over_seeds(mine, other)
    assert [found.value, found.low, found.high] == pytest.approx([0.2] * 3)
    assert found.seeds == pytest.approx([0.2] * 3)


def test_sums_by_name_and_depth() -> None:
    parts = [
        {
            "emitted": [6, 6],
            "steps": [3, 2],
            "tested_by_depth": [[3.0, 2.0, 0.0], [2.0, 2.0, 0.0]],
            "passed_by_depth": [[2.0, 1.0, 0.0], [2.0, 2.0, 0.0]],
        }
    ]
    found = mean(parts, "tau")
    assert found is not None
    assert found.value == 12 / 5
    assert n_alpha(parts) == [4 / 5, 3 / 4, 0.0], "a depth that nobody reached counts as none"


def test_what_no_step_counts_for_is_none() -> None:
    counted, empty = (np.array([6.0]), np.array([3.0])), (np.array([0.0]), np.array([0.0]))
    assert over_seeds([empty]) is None
    assert over_seeds([counted, empty]) is None, "a mean over seeds is of all of them"
    assert gain_over_seeds([counted], [empty]) is None
    assert np.isnan(difference(counted, empty).value)
