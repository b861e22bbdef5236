"""The warper against a plain, slow definition; draws against their distribution."""

import math
from contextlib import AbstractContextManager, ExitStack
from unittest import mock

import numpy as np
import pytest
import torch
from draftsmith.decoding import sampling
from draftsmith.decoding.sampling import Warper, draw
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

# few distinct values, so that ties are common
LOGITS = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5001, 2.0]), min_size=2, max_size=9)


def as_on_cuda(block: int = 3) -> AbstractContextManager[object]:
    """Sums inverted in two steps, as those of long rows are on a GPU."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(sampling, "_scans_slowly", return_value=True))
    stack.enter_context(mock.patch.object(sampling, "_BLOCK", block))
    return stack


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
    with as_on_cuda():
        np.testing.assert_allclose(warper(torch.tensor([logits]))[0].numpy(), slow(logits, warper), atol=2e-6)


@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 1), (0.5 + 2**-20, 3), (0.75, 3), (1.0, 3)])
def test_a_mass_of_exactly_top_p_is_enough(top_p: float, kept: int, by_blocks: bool) -> None:
    """Powers of two, which no rounding moves: the token behind the edge is out, its equals with it."""
    with as_on_cuda(2) if by_blocks else ExitStack():
        got = Warper(1.0, top_p=top_p)(torch.tensor([0.5, 0.25, 0.25]).log())
    assert got.tolist() == ([1, 0, 0] if kept == 1 else [0.5, 0.25, 0.25])


def by_whole_sort(logits_V: Tensor, warper: Warper) -> Tensor:
    """Top-k and top-p from all probabilities in order, without the knowledge that k are enough."""
    logits_V = logits_V / warper.temperature
    last_kept = logits_V.sort(descending=True).values[warper.top_k - 1]
    probs_V = logits_V.masked_fill(logits_V < last_kept, -torch.inf).softmax(-1)
    ordered_V = probs_V.sort(descending=True).values
    before_V = ordered_V.cumsum(-1) - ordered_V
    probs_V = probs_V * (probs_V >= ordered_V[(before_V < warper.top_p).sum() - 1])
    return probs_V / probs_V.sum(-1, keepdim=True)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([0.1, 0.5, 0.9, 0.999, 1 - 2**-24]), st.booleans())
# of four equals at the second place three are behind the first k, and half of the mass is theirs
@example(-1, 2, 0.9, False)
def test_the_nucleus_of_the_first_k_is_that_of_all(seed: int, top_k: int, top_p: float, ties: bool) -> None:
    """To the bit. Equals of the last of k are kept and add to the mass that probabilities are a share of."""
    logits_V = 3 * torch.randn(61, generator=torch.Generator().manual_seed(abs(seed)))
    if ties:
        logits_V = logits_V.round()
    if seed < 0:
        logits_V = torch.tensor([1.0, 0.0, -5.0, 0.0, 0.0, 0.0])
    warper = Warper(0.8, top_k, top_p)
    assert torch.equal(warper(logits_V), by_whole_sort(logits_V, warper))


@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("warper", [Warper(1.0), Warper(1.0, top_p=0.9), Warper(1.0, 3, 0.9, 0.1)])
def test_a_broken_row_is_loud_and_alone(warper: Warper, by_blocks: bool) -> None:
    """On CUDA an index of -1 would end the process."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    logits[0], logits[2, 7] = -torch.inf, torch.nan
    with as_on_cuda(7) if by_blocks else ExitStack():
        got = warper(logits)
        drawn = draw(got, torch.full((3,), 0.5))
    assert got[[0, 2]].isnan().all()
    assert torch.equal(got[1], warper(logits[1]))
    assert got[1, drawn[1]] > 0
    assert ((drawn >= 0) & (drawn < 40)).all()


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


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20).filter(any), st.integers(1, 6))
def test_two_steps_find_the_same_token_at_every_edge(weights: list[int], block: int) -> None:
    """Whole numbers, whose sums no rounding moves: at every edge, and on both sides of it."""
    probs, total = torch.tensor(weights).float(), sum(weights)
    edges = torch.arange(total, dtype=torch.float64) / total
    u = torch.cat([edges, torch.nextafter(edges, edges + 1), torch.nextafter(edges[1:], edges[1:] - 1)])
    # a share of the total that is rounded to the edge itself belongs to the next token; so it does for both
    wanted = draw(probs.expand(len(u), -1), u)
    with as_on_cuda(block):
        assert torch.equal(draw(probs.expand(len(u), -1), u), wanted)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1, exclude_max=True))
def test_two_steps_never_hit_zero_whatever_the_sums_are_rounded_to(seed: int, u: float) -> None:
    """Weights of forty orders of magnitude, most of them nothing, and whole blocks without mass."""
    g = torch.Generator().manual_seed(seed)
    probs = torch.exp(40 * torch.randn(4, 50, generator=g).clamp(-2, 1)) * (torch.rand(4, 50, generator=g) < 0.2)
    probs[:, 17] = 1e-30
    with as_on_cuda(4):
        for point in (u, 0.0, 1 - 2**-53):
            drawn = draw(probs, torch.full((4,), point, dtype=torch.float64))
            assert (probs.gather(1, drawn[:, None]) > 0).all()
