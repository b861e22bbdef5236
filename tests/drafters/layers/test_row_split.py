"""A part of every row with the keys of whole rows: what attention over whole rows gives there."""

from __future__ import annotations

import pytest
import torch
from draftsmith.drafters.layers.llama import Projected
from draftsmith.drafters.layers.passes import Packing, Passes
from draftsmith.drafters.layers.row_split import RowSplit
from draftsmith.drafters.layers.sinks import Keys
from draftsmith.errors import RequestError
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

ROWS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3)


def documents_of(rows: list[list[int]]) -> Tensor:
    """Numbers of documents [B, S]; shorter rows end in padding, -1."""
    width = max(map(sum, rows))
    numbers = [[n for n, length in enumerate(row) for _ in range(length)] for row in rows]
    return torch.tensor([each + [-1] * (width - len(each)) for each in numbers])


def drawn(count: int, B: int, S: int) -> list[Projected]:
    g = torch.Generator().manual_seed(1)
    return [
        Projected(*(torch.randn(B, heads, S, 8, generator=g, dtype=torch.float64) for heads in (4, 2, 2)))
        for _ in range(count)
    ]


def attended(passes: list[Projected], documents_BS: Tensor, split: RowSplit) -> list[Tensor]:
    """Every pass behind the ones before it, at the positions of a part."""
    own, attention = split.own(documents_BS.shape[1]), Passes(documents_BS, 2, split)
    parts = [Projected(*(x[:, :, own] for x in each)) for each in passes]
    first = Projected(parts[0].query_BQND, passes[0].key_BGND, passes[0].value_BGND)  # as if gathered
    sunk = attention.sunk(Keys(first.key_BGND, first.value_BGND))
    between = [Keys(each.key_BGND, each.value_BGND) for each in parts[1:]]
    later = [attention.later(each, sunk, between[:j]) for j, each in enumerate(parts[1:])]
    return [attention.first(first), *later]


@settings(deadline=None, max_examples=40)
@given(ROWS, st.integers(1, 5))
def test_parts_are_cut_out_of_the_whole(rows: list[list[int]], parts: int) -> None:
    documents = documents_of(rows)
    B, S = documents.shape
    parts = min(parts, S)
    passes = drawn(3, B, S)
    whole = attended(passes, documents, RowSplit())
    found = [attended(passes, documents, RowSplit(rank, parts)) for rank in range(parts)]
    for j, wanted in enumerate(whole):
        torch.testing.assert_close(torch.cat([each[j] for each in found], 2), wanted, rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 60), st.integers(0, 8))
def test_parts_are_a_row_without_overlap(parts: int, length: int, ahead: int) -> None:
    if length < parts:
        with pytest.raises(RequestError, match=f"rows of {length} tokens cannot be cut over {parts} processes"):
            RowSplit(0, parts).own(length)
        return
    owns = [RowSplit(rank, parts).own(length) for rank in range(parts)]
    assert [at for own in owns for at in range(own.start, own.stop)] == list(range(length))
    assert {own.stop - own.start for own in owns} <= {length // parts, -(-length // parts)}
    for rank, own in enumerate(owns):
        assert RowSplit(rank, parts).held(length, ahead) == slice(own.start, min(length, own.stop + ahead))


def test_documents_before_a_part_are_not_laid_out() -> None:
    """What began earlier has its keys, and nothing else of the row is touched."""
    documents = documents_of([[4, 10, 2, 8]])
    packing = Packing(documents, slice(12, 18))
    pairs = torch.arange(24.0)[None, None, :, None]
    queries, keys = packing.side_by_side(pairs[:, :, 12:18]), packing.keys_side_by_side(pairs)
    seen = {tuple(q[0, 0, :, 0].tolist()): k[0, 0, :, 0].tolist() for q, k in zip(queries, keys, strict=True)}
    assert seen[12.0, 13.0] == list(range(4, 14))
    assert sum(q.shape[0] * q.shape[2] for q in queries) <= 8
    assert torch.equal(packing.back(queries), pairs[:, :, 12:18])
