"""Cross-entropy of what the text says, unlikelihood of what is to be avoided, against both written out."""

from __future__ import annotations

import torch
from draftsmith.trainers.target import cross_entropy_or_unlikelihood, to_avoid

V = 7


def test_both_are_as_their_equations_say() -> None:
    logits_CV = torch.randn(6, V, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    id_C = torch.tensor([0, 3, 6, 0, 3, 6])
    avoid_C = torch.tensor([False, False, False, True, True, True])
    terms = cross_entropy_or_unlikelihood(logits_CV, None, torch.where(avoid_C, to_avoid(id_C), id_C))
    q_C = logits_CV.softmax(-1)[range(6), id_C]
    expected_C = torch.where(avoid_C, -(1 - q_C).log(), -q_C.log())
    assert torch.allclose(terms["loss"], expected_C)
    assert torch.allclose(terms["ce"] + terms["unlikelihood"], expected_C)
    assert not terms["ce"][avoid_C].any()
    assert not terms["unlikelihood"][~avoid_C].any()
    grads = [torch.autograd.grad(each.sum(), logits_CV, retain_graph=True)[0] for each in (terms["loss"], expected_C)]
    assert torch.allclose(*grads)


def test_a_token_that_is_certain_has_a_finite_loss_and_a_gradient() -> None:
    """1 - q rounds to 0 there, and it is in such loops that a model is stuck."""
    logits_CV = torch.zeros(1, V)
    logits_CV[0, 2] = 60.0
    logits_CV.requires_grad_()
    loss = cross_entropy_or_unlikelihood(logits_CV, None, to_avoid(torch.tensor([2])))["loss"].sum()
    (grad_CV,) = torch.autograd.grad(loss, logits_CV)
    assert torch.isclose(loss, 60 - torch.tensor(V - 1.0).log())
    assert torch.isclose(grad_CV[0, 2], torch.tensor(1.0))
