"""Row order: which rows a step trains on, as a pure function of (seed, step).

Nothing has to be saved or replayed to resume: the position is the step itself. The global batch
is fixed first and split over processes afterwards, so the order does not depend on their number.
Read next: `loop.py`.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


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


def share_of_rank(rows: list[int], rank: int, world: int, micro: int) -> list[list[int]]:
    """Row numbers of one process's micro-batches: every process gets equally many, of equal size.

    `len(rows)` must be a multiple of `world * micro` (`setup.accumulation` checks the recipe).
    """
    mine = rows[rank::world]
    return [mine[at : at + micro] for at in range(0, len(mine), micro)]


def seed_of(key: str) -> int:
    """The seed of everything else that a step draws, from words that say what it is for."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
