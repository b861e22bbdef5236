"""EAGLE's fused loss against its equation, written out and differentiated by torch."""

from __future__ import annotations

import pytest
import torch
from draftsmith.trainers.losses.divergences import overlap, surprises
from draftsmith.trainers.losses.soft_cross_entropy import soft_cross_entropy
from torch import Tensor


def distributions(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of a draft and a target's distribution, from alike to far apart, one peaked, one ruled out."""
    g = torch.Generator().manual_seed(seed)
    draft, target = (torch.randn(6, 40, generator=g, dtype=torch.float64) for _ in range(2))
    target[0] = draft[0]
    target[1] *= 30
    draft[2] *= 30
    target[3, 5:] = -torch.inf
    return draft.requires_grad_(), target.softmax(-1)


@pytest.mark.parametrize("seed", range(3))
def test_value_overlap_and_gradient(seed: int) -> None:
    draft, p = distributions(seed)
    weight = torch.linspace(-1, 2, 6, dtype=torch.float64)
    ce, alpha, most = soft_cross_entropy(draft, p)
    assert not alpha.requires_grad
    assert torch.equal(most, draft.amax(-1))
    (ours,) = torch.autograd.grad((ce * weight).sum(), draft)
    log_q = draft.log_softmax(-1)
    wanted = surprises(p, log_q).sum(-1)
    torch.testing.assert_close(ce, wanted)
    torch.testing.assert_close(alpha, overlap(p.log(), log_q))
    (gradient,) = torch.autograd.grad((wanted * weight).sum(), draft)
    torch.testing.assert_close(ours, gradient)
    assert float(alpha[0]) == pytest.approx(1)
    assert float(alpha[1].detach()) < 0.5


def test_the_overlap_with_a_share_of_the_target() -> None:
    """A draft vocabulary: p of its tokens, as the target has them, is less than 1."""
    draft, p = distributions(0)
    share = torch.linspace(0.1, 1, 6, dtype=torch.float64)
    ce, alpha, _ = soft_cross_entropy(draft, p, share)
    torch.testing.assert_close(alpha, torch.minimum(share[:, None] * p, draft.detach().softmax(-1)).sum(-1))
    plain = soft_cross_entropy(draft, p).ce_C
    assert torch.equal(ce, plain)
    ours, wanted = (torch.autograd.grad(each.sum(), draft)[0] for each in (ce, plain))
    assert torch.equal(ours, wanted)


def test_a_token_that_the_head_rules_out() -> None:
    """With p = 0 it is nothing; with p > 0 the loss is large, and nothing is not a number."""
    draft = torch.tensor([[0.0, 0.0, -torch.inf]] * 2, requires_grad=True)
    p = torch.tensor([[0.25, 0.75, 0.0], [0.25, 0.5, 0.25]])
    ce, alpha, _ = soft_cross_entropy(draft, p)
    assert ce.tolist() == pytest.approx([0.693147, 2500.52], rel=1e-4)
    assert alpha.tolist() == pytest.approx([0.75, 0.75])
    ce.sum().backward()
    assert draft.grad is not None
    assert draft.grad[0].tolist() == pytest.approx([0.25, -0.25, 0.0])
    assert bool(draft.grad.isfinite().all())
