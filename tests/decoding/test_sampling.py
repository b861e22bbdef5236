"""The warper against a plain, slow definition; draws against their distribution."""

import math

import numpy as np
import pytest
import torch
from draftsmith.decoding.sampling import Warper, draw
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

# few distinct values, so that ties are common
LOGITS = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5001, 2.0]), min_size=2, max_size=9)


def slow(logits: list[float], warper: Warper) -> list[float]:
    """The definition, one token at a time."""
    weights = [math.exp(x / warper.temperature) for x in logits]
    if warper.top_k:
        edge = sorted(weights, reverse=True)[min(warper.top_k, len(weights)) - 1]
        weights = [w if w >= edge * (1 - 1e-6) else 0.0 for w in weights]
    total = sum(weights)
    probs = [w / total for w in weights]
    if warper.top_p < 1:
        mass, edge = 0.0, 0.0
        for p in sorted(probs, reverse=True):
            if mass >= warper.top_p:
                break
            mass, edge = mass + p, p
        probs = [p if p >= edge * (1 - 1e-6) else 0.0 for p in probs]
        probs = [p / sum(probs) for p in probs]
    if warper.min_p:
        edge = warper.min_p * max(probs)
        probs = [p if p >= edge * (1 - 1e-6) else 0.0 for p in probs]
        probs = [p / sum(probs) for p in probs]
    return probs


@settings(max_examples=300, deadline=None)
@given(
    LOGITS,
    st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    st.integers(0, 10),
    st.sampled_from([0.2, 0.45, 0.81, 1.0]),
    st.sampled_from([0.0, 0.13, 0.6]),
)
# min-p's share is of what top-k and top-p have kept: here of 2.9 / 4.2, not of 2.9 / 6.5
@example([2.0, 0.5, -1.0, -1.0, -1.0, -1.0], 1.9, 2, 1.0, 0.6)
@example([2.0, 0.5, -1.0, -1.0, -1.0, -1.0], 1.9, 0, 0.45, 0.6)
def test_the_warper_is_its_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    warper = Warper(temperature, top_k, top_p, min_p)
    got = warper(torch.tensor([logits]))[0]
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), slow(logits, warper), atol=2e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 1), (0.5 + 2**-20, 3), (0.75, 3), (1.0, 3)])
def test_a_mass_of_exactly_top_p_is_enough(top_p: float, kept: int) -> None:
    """Powers of two, which no rounding moves: the token behind the edge is out, its equals with it."""
    got = Warper(1.0, top_p=top_p)(torch.tensor([0.5, 0.25, 0.25]).log())
    assert got.tolist() == ([1, 0, 0] if kept == 1 else [0.5, 0.25, 0.25])


@settings(deadline=None)
@given(LOGITS)
def test_greedy_takes_the_lowest_id_among_equals(logits: list[float]) -> None:
    got = Warper(0.0)(torch.tensor(logits))
    assert got.tolist() == [float(i == logits.index(max(logits))) for i in range(len(logits))]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": 1e-40},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_p": 0},
        {"min_p": 1},
        {"top_k": -2},
    ],
)
def test_impossible_settings_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="top|temperature"):
        Warper(**bad)


def test_draws_follow_their_distribution_and_never_hit_zero() -> None:
    distribution = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    u = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = np.bincount(draw(distribution.expand(len(u), -1), u).numpy(), minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    assert stats.chisquare(counts[[1, 3, 4]], [100_000, 40_000, 60_000]).pvalue > 1e-4


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_hit_the_first_and_last_possible_token(u: float) -> None:
    distribution = torch.tensor([0.0, 0.5, 0.5, 0.0])
    assert int(draw(distribution, torch.tensor(u, dtype=torch.float64))) == (1 if u == 0 else 2)
