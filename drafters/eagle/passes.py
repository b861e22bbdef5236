"""Attention in training: documents packed into rows, and several passes, without any mask.

Drawn as a mask (Li et al. 2025, arXiv 2503.01840, section 3.1), J passes over a row of N pairs are
N x JN. Here documents of like length lie side by side and attend by the ordinary causal kernel;
and what a query makes of the later passes' keys, which it sees only at its own position, joins that
softmax as one more key. So what is kept grows with N, not with its square. Read next:
`eagle/net.py`, whose `unroll` goes through here.

Shapes: B rows, N pairs of a row, X = B N of them, J later passes, Q query heads, G key-value heads,
M query heads of a key-value head, D head size, K documents of a group, L pairs of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import Projected, attend

EXTRA = 8
"""Numbers added to a head for the sink: two are used, kernels want a multiple of eight."""


class Keys(NamedTuple):
    """What later passes see of a pass."""

    key_BGND: Tensor
    value_BGND: Tensor


Sunk = tuple[list[Tensor], list[Tensor]]
"""The first pass's keys and values, documents side by side, each with the sink in front."""


class Passes:
    """Attention of one pass after another over the documents of some rows.

    Nothing is kept here, so that a pass can be computed again in the backward pass.
    """

    def __init__(self, documents_BN: Tensor, group: int) -> None:
        """`documents_BN`: number of every pair's document; `group`: query heads of a key's head."""
        self._packing, self._group = Packing(documents_BN), group

    def first(self, pairs: Projected) -> Tensor:
        """The first pass, causal inside each document. [B, Q, N, D]."""
        return self._causal(*(self._packing.side_by_side(x) for x in pairs))

    def sunk(self, first: Keys) -> Sunk:
        """What `later` needs of the first pass, in every later pass the same."""
        side_by_side = self._packing.side_by_side
        keys, values = side_by_side(first.key_BGND), side_by_side(first.value_BGND)
        return [with_sink(x, 2) for x in keys], [with_sink(x, 1) for x in values]

    def later(self, pairs: Projected, sunk: Sunk, between: Sequence[Keys]) -> Tensor:
        """A later pass: over the first one's keys, and the later passes' only at its own position.

        What a query makes of its own keys is put in as one key, a sink, whose score is their log-sum-exp:
        exactly a softmax over all of them. The weight that the kernel gives the sink comes out as one more
        number.

        Args:
            between: the passes between the first and this one.

        Returns:
            [B, Q, N, D].
        """
        query_BQND, D = pairs.query_BQND, pairs.query_BQND.shape[-1]
        own = Keys(pairs.key_BGND, pairs.value_BGND)
        own_BQND, total_BQN = own_keys(query_BQND, [*between, own], self._group)
        # causal means square: so the sink, the first key, gets a query too
        queries = [F.pad(x, (0, 0, 1, 0)) for x in self._packing.side_by_side(scored(query_BQND, total_BQN))]
        out = self._causal(queries, *sunk, scale=D**-0.5)
        return out[..., :D] + out[..., D : D + 1] * own_BQND

    def _causal(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        scale: float | None = None,
    ) -> Tensor:
        outs = [
            attend(query, key, value, None, self._group, scale=scale)
            for query, key, value in zip(queries, keys, values, strict=True)
        ]
        return self._packing.back(outs)


class Packing:
    """Documents of rows, taken apart into groups of like length and put together again.

    The longest of a group is less than twice as long as any other, so that padding at most doubles
    what a group holds; and there are few groups. Neighbours with the same number are a document.
    """

    def __init__(self, documents_BN: Tensor) -> None:
        self._shape = documents_BN.shape
        numbers_BN = documents_BN.cpu()
        first_BN = torch.ones_like(numbers_BN, dtype=torch.bool)
        first_BN[:, 1:] = numbers_BN[:, 1:] != numbers_BN[:, :-1]
        starts = first_BN.flatten().nonzero()[:, 0]
        lengths = torch.diff(starts, append=torch.tensor([numbers_BN.numel()]))
        powers = torch.tensor([int(length).bit_length() for length in lengths.tolist()])
        self._groups: list[Tensor] = []
        """[K, L] each: which of the X pairs is there, 0 after the end of a document."""
        slot_X = torch.empty(numbers_BN.numel(), dtype=torch.long)
        held = 0
        for power in powers.unique().tolist():
            start_K1, length_K1 = (x[powers == power, None] for x in (starts, lengths))
            at_L = torch.arange(int(length_K1.max()))
            inside_KL = at_L < length_K1
            pair_KL = torch.where(inside_KL, start_K1 + at_L, 0)
            slot_X[pair_KL[inside_KL]] = held + inside_KL.flatten().nonzero()[:, 0]
            held += pair_KL.numel()
            self._groups.append(pair_KL.to(documents_BN.device))
        self._slot_X = slot_X.to(documents_BN.device)

    def side_by_side(self, x_BGND: Tensor) -> list[Tensor]:
        """The documents of each group, [K, G, L, D]; garbage after their ends."""
        rows_XGD = x_BGND.transpose(1, 2).flatten(0, 1)
        # `index_select`, because indexing by a tensor takes ten times as long on a CPU
        return [
            rows_XGD.index_select(0, group_KL.flatten()).unflatten(0, group_KL.shape).transpose(1, 2)
            for group_KL in self._groups
        ]

    def back(self, groups: Sequence[Tensor]) -> Tensor:
        """[B, G, N, D] of the groups' last L positions: what comes before belongs to no pair."""
        rows = [
            x_KGLD[:, :, -group_KL.shape[1] :].transpose(1, 2).flatten(0, 1)
            for x_KGLD, group_KL in zip(groups, self._groups, strict=True)
        ]
        pairs_XGD = torch.cat(rows).index_select(0, self._slot_X)
        return pairs_XGD.unflatten(0, self._shape).transpose(1, 2)


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
