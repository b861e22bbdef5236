"""Packing against a brute-force reading of the rows: nothing lost, nothing across documents."""

from __future__ import annotations

import numpy as np
from draftsmith.data.rows.packed import Document, pack
from hypothesis import given, settings
from hypothesis import strategies as st

PAD = 0
lengths = st.lists(st.integers(1, 30), min_size=1, max_size=25)


def documents(sizes: list[int]) -> list[Document]:
    """Documents of distinct tokens, so that any mix-up shows; every third token in the loss."""
    documents, token = [], 1
    for size in sizes:
        ids = np.arange(token, token + size, dtype=np.int32)
        documents.append(Document(ids, ids % 3 == 0))
        token += size
    return documents


def pieces(sizes: list[int], length: int) -> list[tuple[int, ...]]:
    cut = []
    for document in documents(sizes):
        ids = document.ids.tolist()
        cut += [tuple(ids[at : at + length]) for at in range(0, len(ids), length)]
    return sorted(piece for piece in cut if len(piece) > 1)


@settings(deadline=None)
@given(lengths, st.booleans())
def test_nothing_is_lost_or_mixed(sizes: list[int], together: bool) -> None:
    length = 12
    rows = pack(documents(sizes), length, pad=PAD, fingerprint="", together=together)
    batch = rows.batch(range(len(rows)))
    unpacked = []
    for ids, numbers, positions, mask in zip(
        batch["input_ids"], batch["documents"], batch["positions"], batch["loss_mask"]
    ):
        for number in range(int(numbers.max()) + 1):
            at = (numbers == number).nonzero().flatten()
            assert at.diff().eq(1).all()  # contiguous
            assert positions[at].tolist() == list(range(len(at)))
            tokens = ids[at].tolist()
            assert mask[at].tolist() == [False, *(token % 3 == 0 for token in tokens[1:])]
            unpacked.append(tuple(tokens))
        assert (ids[numbers < 0] == PAD).all()
        assert not mask[numbers < 0].any()
    assert sorted(unpacked) == pieces(sizes, length)


@settings(deadline=None)
@given(lengths)
def test_best_fit_uses_few_rows(sizes: list[int]) -> None:
    """Best-fit decreasing needs at most 11/9 of the optimum plus one row (Johnson 1974)."""
    length = 12
    rows = pack(documents(sizes), length, pad=PAD, fingerprint="")
    tokens = sum(map(len, pieces(sizes, length)))
    assert len(rows) <= sum(1 for _ in pieces(sizes, length))
    if len(rows) > 1:  # no two rows would fit into one
        used = sorted((rows.document_RS >= 0).sum(axis=1).tolist())
        assert used[0] + used[1] > length
    assert int((rows.document_RS >= 0).sum()) == tokens


@settings(deadline=None)
@given(lengths, st.integers(1, 40))
def test_some_rows_are_spread_over_all(sizes: list[int], count: int) -> None:
    rows = pack(documents(sizes), 12, pad=PAD, fingerprint="f", together=False)
    some = rows.spread(count)
    assert len(some) == min(count, len(rows))
    held = [tuple(row) for row in rows.ids_RS.tolist()]
    places = [held.index(tuple(row)) for row in some.ids_RS.tolist()]
    assert places == sorted(set(places))
    steps = np.diff([*places, len(rows)])
    assert places[:1] in ([], [0])
    assert max(steps, default=1) <= len(rows) / max(1, len(some)) + 1
    batch, whole = some.batch(range(len(some))), rows.batch(places)
    assert all(batch[name].equal(whole[name]) for name in whole)


def test_all_rows_are_taken_where_no_number_is_given() -> None:
    rows = pack(documents([5, 9, 3]), 12, pad=PAD, fingerprint="")
    assert rows.spread(None) is rows
