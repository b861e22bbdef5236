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

from ...decoding.on_host import is_host
from .divergences import RULED_OUT


class Against(NamedTuple):
    """A draft's distribution q against the target's p, [C] each."""

    ce_C: Tensor
    """- sum_v p log q, the only one with a gradient."""
    alpha_C: Tensor
    """sum_v min(`share` p, q)."""
    most_C: Tensor
    """The draft's largest logit."""


def soft_cross_entropy(draft_CV: Tensor, p_CV: Tensor, share_C: Tensor | None = None) -> Against:
    """Cross-entropy of two distributions, and what falls off on the way.

    Args:
        draft_CV: the draft's logits, fp32; they alone get a gradient, which is q - p.
        p_CV: probabilities that sum to 1. A logit of -inf counts as -10000.
        share_C: the target's mass on these tokens, where it has others too: the overlap is with `share` p. None: all.
    """
    return Against(*_SoftCrossEntropy.apply(draft_CV, p_CV, share_C))


class _SoftCrossEntropy(torch.autograd.Function):
    """The gradient is made in the forward pass, because the overlap comes out of it."""

    @staticmethod
    def forward(ctx: Any, draft_CV: Tensor, p_CV: Tensor, share_C: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        most_C = draft_CV.amax(-1)
        q_CV = draft_CV.softmax(-1)
        # the normaliser from the likeliest token, whose q is never small
        ce_C = most_C - q_CV.amax(-1).log() - _expected(p_CV, draft_CV)
        # min(a, b) = (a + b - |a - b|) / 2
        if torch.compiler.is_compiling():  # as it is fused there, nothing is to be saved by writing over it
            share = 1 if share_C is None else share_C
            part_CV = p_CV if share_C is None else p_CV * share_C[:, None]
            gap_CV, alpha_C = q_CV - p_CV, (1 + share - (q_CV - part_CV).abs().sum(-1)) / 2
        elif share_C is None:
            gap_CV = q_CV.sub_(p_CV)
            alpha_C = 1 - _sum_of_sizes(gap_CV) / 2
        else:
            alpha_C = (1 + share_C - _sum_of_sizes(torch.addcmul(q_CV, p_CV, share_C[:, None], value=-1))) / 2
            gap_CV = q_CV.sub_(p_CV)
        ctx.save_for_backward(gap_CV)
        ctx.mark_non_differentiable(alpha_C, most_C)
        return ce_C, alpha_C, most_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gap_CV,) = ctx.saved_tensors
        if torch.compiler.is_compiling():
            return gap_CV * grads[0][:, None], None, None
        return gap_CV.mul_(grads[0][:, None]), None, None  # in place: it is asked for once


def _expected(p_CV: Tensor, logits_CV: Tensor) -> Tensor:
    """sum_v p x, where x of -inf counts as -10000. [C]."""
    if torch.compiler.is_compiling():
        return (p_CV * logits_CV.clamp_min(RULED_OUT)).sum(-1)
    if is_host(logits_CV.device):  # on a CPU reading a value is free, and going through all once more is not
        sum_C = torch.linalg.vecdot(p_CV, logits_CV)
        if bool(sum_C.isfinite().all()):
            return sum_C
    return torch.linalg.vecdot(p_CV, logits_CV.clamp_min(RULED_OUT))


def _sum_of_sizes(x_CV: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x_CV, ord=1, dim=-1)
