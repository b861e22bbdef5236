"""D-PACE's weights against its definition, with labels that are missing, and the fixed weights."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from draftsmith.trainers.losses.pace import d_pace, geometric, joined, paced
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor


def by_definition(label_q: list[float], known: list[bool], floor: float) -> list[float]:
    """w_j = sum over m >= j of the product over i <= m, places without a label left out."""
    places = [j for j, there in enumerate(known) if there]
    smooth = {j: (1 - floor) * label_q[j] + floor for j in places}
    weights = [0.0] * len(label_q)
    for j in places:
        weights[j] = sum(math.prod(smooth[i] for i in places if i <= m) for m in places if m >= j)
    return weights


@st.composite
def drafts(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    A, J = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    known = torch.rand(A, J, generator=g) < draw(st.sampled_from([0.5, 0.9, 1.0]))
    return torch.rand(A, J, generator=g) ** 3, known


@settings(max_examples=60, deadline=None)
@given(drafts(), st.sampled_from([0.01, 0.5, 1.0]))
def test_the_weights_are_those_of_the_definition(given: tuple[Tensor, Tensor], floor: float) -> None:
    label_q, known = given
    ours = d_pace(label_q.requires_grad_(), known, floor)
    assert not ours.requires_grad
    for row, weights in enumerate(ours.tolist()):
        wanted = by_definition(label_q[row].tolist(), known[row].tolist(), floor)
        assert weights == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_by_hand() -> None:
    """q' is 0.75, 0.5 and 1: alive with 0.75, 0.375, 0.375."""
    label_q, known = torch.tensor([[0.5, 0.0, 1.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert d_pace(label_q, known, 0.5).tolist() == [[1.5, 0.75, 0.375]]
    # all alike when everything passes: what is left to gain is all that remains
    assert d_pace(label_q, known, 1.0).tolist() == [[3.0, 2.0, 1.0]]


def test_the_weight_is_the_share_in_the_gradient_of_the_expected_length() -> None:
    """Without smoothing: d E[length] / d log q_j = w_j, from which the paper derives it."""
    logs = torch.tensor([[-0.2, -1.0, -0.5, -2.0]], dtype=torch.float64).requires_grad_()
    length = logs.exp().cumprod(-1).sum()
    (gradient,) = torch.autograd.grad(length, logs)
    known = torch.ones(1, 4, dtype=torch.bool)
    torch.testing.assert_close(d_pace(logs.exp(), known, 0.0), gradient)


@settings(max_examples=30, deadline=None)
@given(drafts())
def test_places_that_hold_their_own_anchors(given: tuple[Tensor, Tensor]) -> None:
    label_q, known = given
    anchors = [known[:, j].nonzero()[:, 0] for j in range(known.shape[1])]
    draft = torch.cat([torch.full_like(at, j) for j, at in enumerate(anchors)])
    q_P = torch.cat([label_q[at, j] for j, at in enumerate(anchors)])
    together = paced(q_P, torch.cat(anchors), draft, (len(label_q), len(anchors)), partial(d_pace, floor=0.5))
    ours = together.split([len(at) for at in anchors])
    whole = d_pace(label_q, known, 0.5)
    for j, at in enumerate(anchors):
        assert torch.equal(ours[j], whole[at, j])


def test_anchors_are_the_same_number_at_every_place() -> None:
    """Places reach different lengths into a row, the position of the anchor does not change."""
    near = torch.tensor([[True, False, True, True], [False, False, True, False]])
    far = near[:, :2]
    assert joined(near.nonzero(as_tuple=True), 5).tolist() == [0, 2, 3, 7]
    assert joined(far.nonzero(as_tuple=True), 5).tolist() == [0]


def test_fixed_weights() -> None:
    place_P = torch.tensor([0, 2, 1, 0])
    assert geometric(place_P, 1.0) is None
    ours = geometric(place_P, 0.8)
    assert ours is not None
    assert ours.tolist() == pytest.approx([1, 0.64, 0.8, 1])
