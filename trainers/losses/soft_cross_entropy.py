"""EAGLE's loss on distributions, in few passes over the vocabulary.

On a CPU going through a chunk of logits ten times costs as much as making them, and at a step of
EAGLE with the target beside it that was the largest part which is not the target's. Read next:
`divergences.py`, the same equation in the open; `eagle.py` and `eagle3.py`, which minimise it.

Shapes: C positions of a chunk, V tokens that can be drafted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .divergences import RULED_OUT


class Against(NamedTuple):
    """A draft's distribution q against the target's p, [C] each."""

    ce_C: Tensor
    """- sum_v p log q, the only one with a gradient."""
    alpha_C: Tensor
    """sum_v min(p, q)."""
    best_C: Tensor
    """The draft's likeliest token."""


def soft_cross_entropy(draft_CV: Tensor, p_CV: Tensor) -> Against:
    """Cross-entropy of two distributions, and what falls off on the way.

    Args:
        draft_CV: the draft's logits, fp32; they alone get a gradient, which is q - p.
        p_CV: probabilities that sum to 1. A logit of -inf counts as -10000.
    """
    return Against(*_SoftCrossEntropy.apply(draft_CV, p_CV))


class _SoftCrossEntropy(torch.autograd.Function):
    """The gradient is made in the forward pass, because the overlap comes out of it."""

    @staticmethod
    def forward(ctx: Any, draft_CV: Tensor, p_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        best_C1 = draft_CV.argmax(-1, keepdim=True)
        q_CV = draft_CV.softmax(-1)
        # the normaliser from the likeliest token, whose q is never small
        normal_C1 = draft_CV.gather(-1, best_C1) - q_CV.gather(-1, best_C1).log()
        ce_C = normal_C1[:, 0] - torch.linalg.vecdot(p_CV, draft_CV.clamp_min(RULED_OUT))
        gap_CV = q_CV.sub_(p_CV)
        # min(p, q) = (p + q - |p - q|) / 2
        alpha_C = 1 - gap_CV.abs().sum(-1) / 2
        ctx.save_for_backward(gap_CV)
        best_C = best_C1[:, 0]
        ctx.mark_non_differentiable(alpha_C, best_C)
        return ce_C, alpha_C, best_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gap_CV,) = ctx.saved_tensors
        return gap_CV * grads[0][:, None], None
