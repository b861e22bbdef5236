"""A datastore as drafters see it: texts that are searched on the host for the end of a context.

Read next: `rest.py` and `../suffix/index.py`, which search; `data/datastore.py`, which builds one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Store(Protocol):
    """The part of a datastore that drafters use."""

    @property
    def salt(self) -> int:
        """As of `decoding.proposal.Remembering`, of its texts."""

    def longest_end(self, context: Sequence[int], *, longest: int, shortest: int) -> int:
        """Tokens of the longest end of the context that occurs with a token behind it; 0 if none does."""

    def continuations(
        self, context: Sequence[int], *, longest: int, shortest: int, length: int, limit: int
    ) -> NDArray[np.int64]:
        """What follows the longest suffix of the context that occurs, [M, length], -1 padded."""

    @staticmethod
    def trie(continuations: NDArray[np.int64], nodes: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the most frequent prefixes."""
