"""Attention in training: documents packed into rows, and several passes, without any mask.

Drawn as a mask (Li et al. 2025, arXiv 2503.01840, section 3.1), J passes over a row of N pairs are
N x JN. Here documents of like length lie side by side and attend by the ordinary causal kernel;
and what a query makes of the later passes' keys, which it sees only at its own position, joins that
softmax as one more key. So what is kept grows with N, not with its square. Where a row is cut over
processes, queries are those of the own part, and the first pass's keys those of the whole row. Read next:
`packing.py`, the documents of like length; `sinks.py`, that one more key; `row_split.py`, the parts;
`../eagle/net.py`, whose `unroll` goes through here.

Shapes: B rows, S pairs of a row, N of them in the own part (all, but for a row that is cut), J later passes, Q query
heads, G key-value heads, D head size, K documents of a group, L pairs of the longest, T keys of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .llama import Projected, attend
from .packing import Packing
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
