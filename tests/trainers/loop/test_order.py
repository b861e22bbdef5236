"""The row order is a function of (seed, step) and nothing else."""

import pytest
from draftsmith.errors import RequestError
from draftsmith.trainers.loop.order import RowGroup, RowOrder, share_of_group
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 17), st.integers(0, 2**63), st.integers(1, 6))
def test_every_epoch_sees_every_row_once(rows: int, batch: int, seed: int, epochs: int) -> None:
    order = RowOrder(rows, batch, seed)
    steps = -(-rows * epochs // batch)
    seen = [row for step in range(steps) for row in order.step(step)][: rows * epochs]
    for epoch in range(epochs):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_ranks_share_a_batch_without_overlap(groups: int, size: int, micro: int, accumulation: int) -> None:
    """Every row is once in a group, and all processes of a group have the same ones."""
    rows, world = list(range(groups * micro * accumulation)), groups * size
    shares = [share_of_group(rows, RowGroup.of(rank, world, size), micro) for rank in range(world)]
    assert all(shares[rank] == shares[rank - rank % size] for rank in range(world))
    assert sorted(row for share in shares[::size] for part in share for row in part) == rows
    assert all(len(part) == micro for share in shares for part in share)


@pytest.mark.parametrize(("world", "size", "launch"), [(1, 2, 2), (3, 2, 2), (6, 4, 4), (9, 4, 8)])
def test_processes_that_are_left_over_are_refused(world: int, size: int, launch: int) -> None:
    with pytest.raises(RequestError, match=f"context_parallel is {size}.* {world} process.* launch {launch} "):
        RowGroup.of(0, world, size)


def test_a_step_is_the_same_whoever_asks_and_when() -> None:
    late = RowOrder(1000, 16, 7)
    for step in range(200):
        late.step(step)
    assert RowOrder(1000, 16, 7).step(150) == late.step(150)
    assert RowOrder(1000, 16, 8).step(150) != late.step(150)
    epoch = [RowOrder(20, 20, 0).step(step) for step in range(3)]
    assert epoch[0] != epoch[1] != epoch[2] != epoch[0]
    # pinned, so that a new version of a library cannot change what a resumed run trains on
    assert RowOrder(10, 5, 0).step(0) == [0, 2, 9, 1, 8]
