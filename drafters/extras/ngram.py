"""An n-gram table: the likeliest next token after the last few, counted from a corpus.

Contexts of n - 1 tokens back off to shorter ones (Brants et al. 2007, without the discount: only
the argmax matters here). Read next: `../lookup/lookup.py`.

Shapes: B rows, K drafted tokens, U contexts of one length, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...decoding.random import salt_of
from ...errors import RequestError
from ..config import check_values
from ..lookup.lookup import ChainLookup
from ..lookup.tries import check_ids

Ints = NDArray[np.int64]


class NgramTable:
    """For every context length the contexts seen, as sorted numbers, and what follows them most."""

    def __init__(self, tables: Sequence[tuple[Ints, Ints]], vocabulary: int) -> None:
        """`tables[m - 1]`: keys and next tokens, int64 [U] each, of contexts of m tokens."""
        self.tables, self.vocabulary = tables, vocabulary
        self.salt = salt_of(*(each.tobytes() for table in tables for each in table))

    @classmethod
    def count(cls, documents: Iterable[Sequence[int]], *, order: int, vocabulary: int) -> NgramTable:
        """Count n-grams up to `order` tokens; ties go to the smaller id.

        Raises:
            RequestError: the corpus has no n-gram, or contexts do not fit 63 bits.
        """
        if order < 2 or (order - 1) * np.log2(vocabulary) >= 63:
            raise RequestError(
                f"an n-gram table of order {order} over {vocabulary} tokens (drafter.ngram.order): expected at least "
                "2, and contexts of order - 1 tokens that fit 63 bits"
            )
        texts = [np.asarray(document, dtype=np.int64) for document in documents]
        tables = [_count_contexts(texts, length, vocabulary) for length in range(1, order)]
        if not len(tables[0][0]):
            raise RequestError(
                "drafter.ngram.corpus has no two tokens in a row, and an n-gram table counts what follows what; name "
                "longer texts"
            )
        return cls(tables, vocabulary)


def _count_contexts(texts: Sequence[Ints], length: int, vocabulary: int) -> tuple[Ints, Ints]:
    """Contexts of `length` tokens in order, and the token that most often follows each."""
    keys, following = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for text in texts:
        if len(text) <= length:
            continue
        key = np.zeros(len(text) - length, dtype=np.int64)
        for offset in range(length):
            key = key * vocabulary + text[offset : offset + len(key)]
        keys.append(key)
        following.append(text[length:])
    key_X, next_X = np.concatenate(keys), np.concatenate(following)
    order = np.lexsort((next_X, key_X))
    key_X, next_X = key_X[order], next_X[order]
    # runs of equal (context, next), then the longest run of each context
    starts = np.flatnonzero(np.diff(key_X, prepend=-1) | np.diff(next_X, prepend=-1))
    counts = np.diff(starts, append=len(key_X))
    best = np.lexsort((next_X[starts], -counts, key_X[starts]))
    first = np.flatnonzero(np.diff(key_X[starts][best], prepend=-1))
    chosen = starts[best[first]]
    return key_X[chosen], next_X[chosen]


class Ngram(ChainLookup):
    """Drafts the likeliest continuation by the table, one token after another."""

    family = "ngram"

    def __init__(self, table: NgramTable, *, draft_length: int = 4, device: torch.device | str = "cpu") -> None:
        """Raises RequestError for a `draft_length` that no recipe may have."""
        check_values("ngram", draft_length=draft_length)
        super().__init__(draft_length, device)
        self.table = table
        self._tables = [
            (torch.from_numpy(keys).to(device), torch.from_numpy(following).to(device))
            for keys, following in table.tables
            if len(keys)  # a corpus of short texts has no long contexts
        ]
        self._highest = max(int(following.max(initial=-1)) for _, following in table.tables)

    def hold_to(self, vocabulary: int) -> None:
        """As of `decoding.proposal.Bounded`."""
        check_ids([self._highest], vocabulary, "the corpus of an n-gram table")

    def salt(self) -> int:
        """As of `decoding.proposal.Remembering`: the target may have written the corpus."""
        return self.table.salt

    def find(self) -> tuple[Tensor, Tensor]:
        """The table's chain after the history: tokens [B, K], how many [B]."""
        recent_BM = self._history.recent(len(self._tables))
        known_B = torch.ones_like(recent_BM[:, 0], dtype=torch.bool)
        count_B = torch.zeros_like(recent_BM[:, 0])
        tokens = []
        for _ in range(self.draft_length):
            next_B = self._next(recent_BM)
            known_B = known_B & (next_B >= 0)
            count_B = count_B + known_B
            tokens.append(next_B)
            recent_BM = torch.cat([next_B[:, None], recent_BM[:, :-1]], 1)
        return torch.stack(tokens, 1), count_B

    def _next(self, recent_BM: Tensor) -> Tensor:
        """The likeliest next token by the longest context known, -1 if none is. [B]."""
        best_B = torch.full_like(recent_BM[:, 0], -1)
        key_B = torch.zeros_like(best_B)
        scale = 1
        for length, (keys_U, following_U) in enumerate(self._tables, 1):
            token_B = recent_BM[:, length - 1]
            key_B = key_B + token_B * scale
            scale *= self.table.vocabulary
            at_B = torch.searchsorted(keys_U, key_B).clamp_max(len(keys_U) - 1)
            hit_B = (keys_U[at_B] == key_B) & (recent_BM[:, :length] >= 0).all(1)
            best_B = torch.where(hit_B, following_U[at_B], best_B)
        return best_B
