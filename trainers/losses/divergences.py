"""How far a draft's distribution q is from the target's distribution p, position by position: the objective matrix.

Pure functions of one chunk, each beside its equation and source. A distribution comes as its logarithm, so
that nothing underflows; a token that a distribution rules out has -inf. p is a constant: gradients go to q
alone. Read next: `mix.py`, the weighted sum that a recipe asks for.

Shapes: C positions of a chunk, V tokens that can be drafted, K likeliest tokens. Everything is
fp32; what comes out is [C], in nats where it is a logarithm.

p may be short of mass where a draft's vocabulary lacks tokens of the target's (EAGLE-3).
`overlap` and what is built on it want it like that: mass outside can never be accepted. The others
compare two distributions of the same tokens, and want p renormalised.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# stands for -inf where a difference of two logarithms is taken: e^-10000 is 0 in any precision,
# and no logits of a real model are so far apart
RULED_OUT = -1e4


def forward_kl(log_p_CV: Tensor, log_q_CV: Tensor) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q). Hinton et al. 2015; FKL of DistillSpec (2310.08461).

    It makes q cover all that p may generate. Where q is 0 and p is not, it is fp32's largest number,
    without a gradient there.
    """
    return (log_p_CV.exp() * (log_p_CV - log_q_CV)).nan_to_num(0.0).sum(-1)


def reverse_kl(log_p_CV: Tensor, log_q_CV: Tensor) -> Tensor:
    """KL(q || p) = sum_v q (log q - log p). RKL of DistillSpec; MiniLLM (Gu et al. 2306.08543).

    It keeps q to what p is likely to generate. A p of 0 counts as e^-10000.
    """
    log_q_CV = _finite(log_q_CV)
    return (log_q_CV.exp() * (log_q_CV - _finite(log_p_CV))).sum(-1)


def jsd(log_p_CV: Tensor, log_q_CV: Tensor, beta: float) -> Tensor:
    """b KL(p || m) + (1 - b) KL(q || m), m = b p + (1 - b) q. Agarwal et al. 2024 (2306.13649).

    Between the two: divided by b or by 1 - b it becomes forward or reverse KL as that goes to 0.
    It is bounded, by log 2 at b = 0.5.
    """
    log_p_CV, log_q_CV = _finite(log_p_CV), _finite(log_q_CV)
    p_CV, q_CV = log_p_CV.exp(), log_q_CV.exp()
    mean_CV = beta * p_CV + (1 - beta) * q_CV
    log_mean_CV = mean_CV.clamp_min(torch.finfo(mean_CV.dtype).tiny).log()
    return (beta * p_CV * (log_p_CV - log_mean_CV) + (1 - beta) * q_CV * (log_q_CV - log_mean_CV)).sum(-1)


def overlap(log_p_CV: Tensor, log_q_CV: Tensor, siblings: int = 1) -> Tensor:
    """alpha = sum_v min(p, q): the probability that a token drawn from q is accepted.

    Leviathan et al. 2023 (2211.17192), theorem 3.5. Of several siblings, drawn from q, sum_v min(p, 1 - (1 - q)^k):
    a lossless rule keeps a token at most as often as the target says it, and as it is drawn at all. One sibling
    reaches that, and any number of them where p is one token.
    """
    if siblings == 1:
        return torch.minimum(log_p_CV, log_q_CV).exp().sum(-1)
    return torch.minimum(log_p_CV.exp(), drawn(log_q_CV.exp(), siblings)).sum(-1)


def drawn(q_CV: Tensor, siblings: int) -> Tensor:
    """1 - (1 - q)^k: how likely each token is among so many that are drawn from q."""
    if siblings == 1:
        return q_CV
    # log(1 - q) of a q of 1 has no gradient that could be multiplied by 0
    return -torch.expm1(siblings * torch.log1p(-q_CV.clamp_max(1 - torch.finfo(q_CV.dtype).eps)))


def total_variation(log_p_CV: Tensor, log_q_CV: Tensor, siblings: int = 1) -> Tensor:
    """1 - alpha. TVD of DistillSpec: half the sum of |p - q| when p sums to 1 and there is one sibling.

    A draft from scratch learns little from it: where p and q hardly overlap, the gradient is small.
    Begin with a KL (`ramp.py`).
    """
    return 1 - overlap(log_p_CV, log_q_CV, siblings)


def lk_alpha(log_p_CV: Tensor, log_q_CV: Tensor, siblings: int = 1) -> Tensor:
    """-log alpha, whose gradient is that of TV, divided by alpha. Samarin et al. 2026 (2602.23881).

    Kept in logarithms, so that an alpha too small for fp32 still has a gradient.
    """
    return -_finite(torch.minimum(log_p_CV, _log_drawn(log_q_CV, siblings))).logsumexp(-1)


def lk_lambda(kl_C: Tensor, tv_C: Tensor, eta: float) -> Tensor:
    """w KL + (1 - w) TV, w = exp(-eta alpha) without a gradient. Samarin et al. 2026 (2602.23881).

    A position moves from the KL to TV as its acceptance rises.
    """
    share_C = (-eta * (1 - tv_C.detach())).exp()
    return share_C * kl_C + (1 - share_C) * tv_C


def surprises(p_CV: Tensor, log_q_CV: Tensor) -> Tensor:
    """- p log q of every token, [C, V]. Its sum over v is the soft cross-entropy of EAGLE-1 and 3.

    It is the forward KL plus the entropy of p, which no draft can change.
    """
    # a token whose logit is -inf has p = 0 and log q = -inf
    return -(p_CV * log_q_CV).nan_to_num(0.0)


def likeliest(p_CV: Tensor, tokens: int) -> Tensor:
    """Ids [C, K] of the likeliest tokens, all of them where there are fewer than `tokens`."""
    return p_CV.topk(min(tokens, p_CV.shape[-1])).indices


def top_k_cross_entropy(p_CV: Tensor, log_q_CV: Tensor, tokens: int) -> Tensor:
    """- sum of p log q over the `tokens` likeliest of p, as they are. HASS (2408.15766)."""
    best_CK = likeliest(p_CV, tokens)
    return surprises(p_CV.gather(-1, best_CK), log_q_CV.gather(-1, best_CK)).sum(-1)


def _log_drawn(log_q_CV: Tensor, siblings: int) -> Tensor:
    """log `drawn`, also where q is too small for fp32: k q, but for a part in a million."""
    if siblings == 1:
        return log_q_CV
    q_CV = log_q_CV.exp()
    large_CV = drawn(q_CV, siblings).clamp_min(torch.finfo(q_CV.dtype).tiny).log()
    return torch.where(siblings * q_CV < 1e-6, log_q_CV + math.log(siblings), large_CV)


def _finite(log_CV: Tensor) -> Tensor:
    """A distribution's logarithm with -inf replaced, and no gradient there."""
    return log_CV.clamp_min(RULED_OUT)
