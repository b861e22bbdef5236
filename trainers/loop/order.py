"""Row order: which rows a step trains on, as a pure function of (seed, step).

Nothing has to be saved or replayed to resume: the position is the step itself. The global batch
is fixed first and split over processes afterwards, so the order does not depend on their number.
Read next: `loop.py`.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import RequestError


class RowOrder:
    """An endless sequence of row numbers, shuffled anew in every epoch."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        if rows < 1:
            raise ValueError("an order over no rows")
        self.rows, self.batch, self.seed = rows, batch, seed

    def step(self, step: int) -> list[int]:
        """Row numbers of the global batch of `step`, counted from 0; a batch may span two epochs."""
        first = step * self.batch
        return [self._row(at) for at in range(first, first + self.batch)]

    def epoch(self, step: int) -> float:
        """Epochs finished before `step`, fractional."""
        return step * self.batch / self.rows

    def _row(self, at: int) -> int:
        epoch, index = divmod(at, self.rows)
        return int(_permutation(self.rows, self.seed, epoch)[index])


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # numpy keeps the raw stream of a bit generator stable for ever, but not `permutation`; sorting
    # raw draws is a shuffle that no new version can change
    key = np.array([seed & (2**64 - 1), epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(rows), kind="stable")


class RowGroup(NamedTuple):
    """The processes that get the same rows, as each works on a part of them; one process where rows are whole."""

    number: int
    """Of this process's group, from 0."""
    groups: int
    """Groups of the run."""
    size: int
    """Processes of a group: neighbours by rank, so that they are on one machine where it is large enough."""

    @classmethod
    def of(cls, rank: int, world: int, size: int) -> RowGroup:
        """The group of a process; `group_count` checks that there are whole groups."""
        return cls(rank // size, group_count(world, size), size)


def group_count(world: int, size: int) -> int:
    """How many groups of `size` processes there are.

    Raises:
        RequestError: one would be left over.
    """
    if world % size:
        raise RequestError(
            f"loop.context_parallel is {size}, and {world} process{'es are' if world > 1 else ' is'} no multiple of "
            f"it; launch {size * max(1, world // size)} (accelerate launch --num_processes), or set "
            "--loop.context_parallel 1"
        )
    return world // size


def share_of_group(rows: list[int], group: RowGroup, micro: int) -> list[list[int]]:
    """Row numbers of one group's micro-batches: every group gets equally many, of equal size.

    `len(rows)` must be a multiple of `group.groups * micro` (`setup.accumulation` checks the recipe).
    """
    mine = rows[group.number :: group.groups]
    return [mine[at : at + micro] for at in range(0, len(mine), micro)]


def seed_of(key: str) -> int:
    """The seed of everything else that a step draws, from words that say what it is for."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


def scores(key: str, count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) that are a function of the key."""
    return np.random.Generator(np.random.Philox(key=seed_of(key))).random(count)
