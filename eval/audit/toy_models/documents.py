"""Documents of three tokens, for drafters that look text up.

`MemoryStore` is the look-up of a datastore without its file; the trie is the datastore's own.
Read next: `../toys.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ....data.datastore import Datastore
from ....decoding.random import salt_of

DOCUMENTS = [[0, 1, 0, 2, 2, 1], [2, 0, 0, 1, 2, 1, 1], [1, 0, 2, 0]]


class MemoryStore:
    """The look-up of a datastore, over documents in memory."""

    salt = salt_of(*map(bytes, DOCUMENTS))

    @staticmethod
    def trie(continuations: NDArray[np.int64], nodes: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the most frequent prefixes."""
        return _trie(continuations.tobytes(), continuations.shape, nodes)

    def longest_end(self, context: Sequence[int], *, longest: int, shortest: int) -> int:
        """Tokens of the longest end of the context that occurs with a token behind it; 0 if none does."""
        ends = range(min(longest, len(context)), shortest - 1, -1)
        return next((size for size in ends if len(_follow(tuple(context), size, size, 1, 1))), 0)

    def continuations(
        self, context: Sequence[int], *, longest: int, shortest: int, length: int, limit: int
    ) -> NDArray[np.int64]:
        """What follows the longest suffix that occurs, [M, length], -1 padded."""
        return _follow(tuple(context), longest, shortest, length, limit)


@lru_cache(maxsize=1024)
def _trie(data: bytes, shape: tuple[int, ...], nodes: int) -> tuple[list[int], list[int]]:
    return Datastore.trie(np.frombuffer(data, dtype=np.int64).reshape(shape), nodes)


@lru_cache(maxsize=1024)
def _follow(context: tuple[int, ...], longest: int, shortest: int, length: int, limit: int) -> NDArray[np.int64]:
    for size in range(min(longest, len(context)), shortest - 1, -1):
        wanted = list(context[-size:])
        continuations = [
            (text[at + size : at + size + length] + [-1] * length)[:length]
            for text in DOCUMENTS
            for at in range(len(text) - size)
            if text[at : at + size] == wanted
        ]
        if continuations:
            return np.array(continuations[:limit], dtype=np.int64)
    return np.empty((0, length), dtype=np.int64)
