"""Attention in training: documents packed into rows, and several passes, without any mask.

Drawn as a mask (Li et al. 2025, arXiv 2503.01840, section 3.1), J passes over a row of N pairs are
N x JN. Here documents of like length lie side by side and attend by the ordinary causal kernel;
and what a query makes of the later passes' keys, which it sees only at its own position, joins that
softmax as one more key. So what is kept grows with N, not with its square. Where a row is cut over
processes, queries are those of the own part, and the first pass's keys those of the whole row.

Read next: `sinks.py`, that one more key; `row_split.py`, the parts;
`../eagle/net.py`, whose `unroll` goes through here.

Shapes: B rows, S pairs of a row, N of them in the own part (all, but for a row that is cut), X = B N of them, J later
passes, Q query heads, G key-value heads, D head size, K documents of a group, L pairs of the longest, T keys of the
longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...decoding.on_host import on_host, sent
from .llama import Projected, attend
from .row_split import WHOLE, RowSplit
from .sinks import Keys, by_own_keys, with_own, with_sink
from .static import Static, as_it_is

Sunk = tuple[list[Tensor], list[Tensor]]
"""The first pass's keys and values, documents side by side, each with the sink in front."""


class Passes:
    """Attention of one pass after another over the documents of some rows.

    Nothing is kept here, so that a pass can be computed again in the backward pass.
    """

    def __init__(self, documents_BS: Tensor, group: int, split: RowSplit = WHOLE, static: Static = as_it_is) -> None:
        """Nothing is attended to yet.

        Args:
            documents_BS: number of every pair's document, of whole rows.
            group: query heads of a key's head.
            split: the part of each row that queries come from.
            static: what compiles attention over a query's own keys.
        """
        self._static = static
        self._split, self._length = split, documents_BS.shape[1]
        self._packing, self._group = Packing(documents_BS, split.own(self._length)), group

    def gathered(self, pairs: Projected) -> Projected:
        """The first pass's pairs with the keys and values of whole rows, [B, G, S, D]; queries as they are.

        The processes that share rows call it together.
        """
        if self._split.parts == 1:
            return pairs
        both = torch.cat((pairs.key_BGND, pairs.value_BGND), 1)
        key_BGSD, value_BGSD = self._split.gathered(both, self._length).chunk(2, 1)
        return Projected(pairs.query_BQND, key_BGSD, value_BGSD)

    def first(self, pairs: Projected) -> Tensor:
        """The first pass, causal inside each document: keys and values are `gathered`. [B, Q, N, D]."""
        keys = (self._packing.keys_side_by_side(x) for x in (pairs.key_BGND, pairs.value_BGND))
        return self._causal(self._packing.side_by_side(pairs.query_BQND), *keys)

    def sunk(self, first: Keys) -> Sunk:
        """What `later` needs of the first pass, in every later pass the same; `first` is `gathered`."""
        side_by_side = self._packing.keys_side_by_side
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
        query_BQND = pairs.query_BQND
        looked = self._static("attention over a pair's own keys", by_own_keys)
        own_BQND, scored_BQND = looked(query_BQND, [*between, Keys(pairs.key_BGND, pairs.value_BGND)], self._group)
        queries = self._packing.side_by_side(scored_BQND)
        return with_own(self._causal(queries, *sunk, scale=query_BQND.shape[-1] ** -0.5), own_BQND)

    def _causal(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        scale: float | None = None,
    ) -> Tensor:
        outs = [
            attend(_square(query, key), key, value, None, self._group, scale=scale)
            for query, key, value in zip(queries, keys, values, strict=True)
        ]
        return self._packing.back(outs)


def _square(query_KQLD: Tensor, key_KGTD: Tensor) -> Tensor:
    """Queries for all keys, as causal means square: what has none (the sink, keys of earlier parts) gets zeros."""
    missing = key_KGTD.shape[2] - query_KQLD.shape[2]
    return F.pad(query_KQLD, (0, 0, missing, 0)) if missing else query_KQLD


class Packing:
    """Documents of rows, taken apart into groups of like length and put together again.

    The longest of a group is less than twice as long as any other, so that padding at most doubles
    what a group holds; and there are few groups. Neighbours with the same number are a document. Of rows
    that are cut, one that began in an earlier part is a group of its own, with more keys than queries.
    """

    def __init__(self, documents_BS: Tensor, own: slice | None = None) -> None:
        """`own`: the positions of each row that are taken apart; None: all."""
        numbers_BS, device = on_host(documents_BS), documents_BS.device
        B, S = numbers_BS.shape
        own = slice(0, S) if own is None else own
        N = own.stop - own.start
        self._shape = (B, N)
        start_D, first_D, length_D, before_D = _documents(numbers_BS, own)
        kinds = torch.tensor([int(length).bit_length() for length in length_D.tolist()])
        begun = before_D > 0
        kinds[begun] = -1 - torch.arange(int(begun.sum()))
        self._groups: list[tuple[Tensor, Tensor]] = []
        """[K, L] and [K, T] each: which of the X pairs, and of all pairs of the rows, is there as query and as key;
        0 after the end of a document."""
        slot_X = torch.empty(B * N, dtype=torch.long)
        held = 0
        for kind in kinds.unique().tolist():
            here = kinds == kind
            pair_KL, inside_KL = _placed(first_D[here], length_D[here])
            key_KT, _ = _placed(start_D[here], length_D[here] + before_D[here])
            slot_X[pair_KL[inside_KL]] = held + inside_KL.flatten().nonzero()[:, 0]
            held += pair_KL.numel()
            on_device = sent(pair_KL, device)
            # of whole rows both are the same
            self._groups.append((on_device, on_device if N == S else sent(key_KT, device)))
        self._slot_X = sent(slot_X, device)

    def side_by_side(self, x_BGND: Tensor) -> list[Tensor]:
        """The documents of each group in the own part, [K, G, L, D]; garbage after their ends."""
        return _taken(x_BGND, [pair_KL for pair_KL, _ in self._groups])

    def keys_side_by_side(self, x_BGSD: Tensor) -> list[Tensor]:
        """The same documents from their first pair on, of whole rows, [K, G, T, D]."""
        return _taken(x_BGSD, [key_KT for _, key_KT in self._groups])

    def back(self, groups: Sequence[Tensor]) -> Tensor:
        """[B, G, N, D] of the groups' last L positions: what comes before belongs to no pair."""
        rows = [
            x_KGLD[:, :, -pair_KL.shape[1] :].transpose(1, 2).flatten(0, 1)
            for x_KGLD, (pair_KL, _) in zip(groups, self._groups, strict=True)
        ]
        pairs_XGD = torch.cat(rows).index_select(0, self._slot_X)
        return pairs_XGD.unflatten(0, self._shape).transpose(1, 2)


def _documents(numbers_BS: Tensor, own: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The documents that have a pair in the own part, int64 [documents] each.

    Returns:
        Where each begins, counted through the pairs of whole rows; where its first own pair is, counted through
        own pairs; how many of those it has; and how many pairs stand before them.
    """
    S, N = numbers_BS.shape[1], own.stop - own.start
    first_BS = torch.ones_like(numbers_BS, dtype=torch.bool)
    first_BS[:, 1:] = numbers_BS[:, 1:] != numbers_BS[:, :-1]
    start_D = first_BS.flatten().nonzero()[:, 0]
    row_D, at_D = start_D // S, start_D % S
    end_D = at_D + torch.diff(start_D, append=torch.tensor([numbers_BS.numel()]))
    from_D, to_D = at_D.clamp_min(own.start), end_D.clamp_max(own.stop)
    here = from_D < to_D
    found = (start_D, row_D * N + from_D - own.start, to_D - from_D, from_D - at_D)
    start_D, first_D, length_D, before_D = (each[here] for each in found)
    return start_D, first_D, length_D, before_D


def _placed(start_K: Tensor, length_K: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of so many pairs from each start on, [K, L], 0 behind their ends; and where they are inside, bool."""
    at_L = torch.arange(int(length_K.max()))
    inside_KL = at_L < length_K[:, None]
    return torch.where(inside_KL, start_K[:, None] + at_L, 0), inside_KL


def _taken(x_BGND: Tensor, groups: Sequence[Tensor]) -> list[Tensor]:
    rows_XGD = x_BGND.transpose(1, 2).flatten(0, 1)
    # `index_select`, because indexing by a tensor takes ten times as long on a CPU
    return [
        rows_XGD.index_select(0, pair_KL.flatten()).unflatten(0, pair_KL.shape).transpose(1, 2) for pair_KL in groups
    ]
