"""Keys that a query has for itself, as one more key of an ordinary attention: a sink.

Its score is the log-sum-exp of theirs, which is exactly a softmax over all of them. Read next: `passes.py`, EAGLE's
later passes; `sunk.py`, a text that many queries read beside keys of their own.

Shapes: B rows, N queries, J later passes, Q query heads, G key-value heads, M query heads of a key-value head, D head
size, K documents of a group, L pairs of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EXTRA = 8
"""Numbers added to a head for the sink: two are used, kernels want a multiple of eight."""


class Keys(NamedTuple):
    """Keys and values, turned to their positions."""

    key_BGND: Tensor
    value_BGND: Tensor


def by_own_keys(query_BQND: Tensor, later: Sequence[Keys], group: int) -> tuple[Tensor, Tensor]:
    """What `own_keys` finds, [B, Q, N, D], and the queries that know of it (`scored`)."""
    own_BQND, total_BQN = own_keys(query_BQND, later, group)
    return own_BQND, scored(query_BQND, total_BQN)


def own_keys(query_BQND: Tensor, later: Sequence[Keys], group: int) -> tuple[Tensor, Tensor]:
    """Attention over the keys of later passes at the query's own position.

    Returns:
        What comes of it, [B, Q, N, D], and the log-sum-exp of its scores, fp32 or better [B, Q, N].
    """
    # a key-value head's queries side by side: keys are looked at where they are, never repeated
    query_BGMND = query_BQND.unflatten(1, (-1, group))
    scale = query_BQND.shape[-1] ** -0.5
    scores = [(query_BGMND * each.key_BGND[:, :, None]).float().sum(-1) * scale for each in later]
    score_JBGMN = torch.stack(scores)
    weight_JBGMN = score_JBGMN.softmax(0).to(query_BQND.dtype)
    out_BGMND = torch.zeros_like(query_BGMND)
    for weight_BGMN, each in zip(weight_JBGMN, later, strict=True):
        out_BGMND = out_BGMND + weight_BGMN[..., None] * each.value_BGND[:, :, None]
    return out_BGMND.flatten(1, 2), score_JBGMN.logsumexp(0).flatten(1, 2)


def scored(query_BQND: Tensor, total_BQN: Tensor) -> Tensor:
    """Queries, longer by the sink's score: [B, Q, N, D + EXTRA], for a kernel that scales scores by D^-0.5.

    Args:
        total_BQN: log-sum-exp of the scores that the sink stands for, fp32 or better.
    """
    # in two parts, or half precision would round the score
    score_BQN1 = (total_BQN * query_BQND.shape[-1] ** 0.5)[..., None]
    high = score_BQN1.to(query_BQND.dtype)
    rest = (score_BQN1 - high.float()).to(query_BQND.dtype)
    return F.pad(torch.cat((query_BQND, high, rest), -1), (0, EXTRA - 2))


def with_sink(x_KGLD: Tensor, ones: int) -> Tensor:
    """One more position at the front: zeros, but `ones` of the added numbers are 1.

    Of keys two, which `scored` speaks to; of values one, so that the sink's weight comes out as a number.
    """
    D = x_KGLD.shape[-1]
    wide = F.pad(x_KGLD, (0, EXTRA, 1, 0))
    wide[:, :, 0, D : D + ones] = 1
    return wide


def with_own(out: Tensor, own_BQND: Tensor) -> Tensor:
    """Attention over sunk keys with what the sink stands for, by the weight that came out of it. [B, Q, N, D]."""
    D = own_BQND.shape[-1]
    return out[..., :D] + out[..., D : D + 1] * own_BQND
