"""LLMA: copy from a reference document where it has the last tokens of the text.

Yang et al. 2023 (arXiv 2304.04487): a match of one token triggers, the longest of up to 5 is
preferred, 20 tokens are verified, the current one included. Of several places the first is copied. The work
of a draft does not grow with the references.

The index is a table per length, searched in as many steps as it has bits. A string of m tokens is numbered by the
number of its last m - 1 tokens and the token in front of them, so that a key always fits into 63 bits, whatever the
vocabulary. Everything is on the device, in fixed shapes.

Read next: `../lookup/lookup.py`.

Shapes: B rows, K drafted tokens, L tokens of all references, M tokens of the longest string, U strings of one
length, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...decoding.random import salt_of
from ..config import check_shortest, check_values
from ..lookup.lookup import ChainLookup, copy_after
from ..lookup.tries import check_ids


class Llma(ChainLookup):
    """Copies from documents that all rows share."""

    family = "llma"

    def __init__(
        self,
        references: Sequence[Sequence[int]],
        *,
        draft_length: int = 19,
        longest: int = 5,
        shortest: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """`references`: token ids of the documents; `longest`, `shortest`: tokens that match.

        Raises:
            RequestError: a value that no recipe may have, or no match may be.
        """
        check_values("llma", draft_length=draft_length, longest=longest)
        check_shortest(shortest, longest)
        super().__init__(draft_length, device)
        self.longest, self.shortest = longest, shortest
        flat = [token for document in references for token in (*document, SEPARATOR)] or [SEPARATOR]
        self._index = GramIndex(flat, longest, device)
        self._source_1L = torch.tensor([flat], dtype=torch.long, device=device)
        self._highest = max(flat)
        self._salt = salt_of(np.array(flat, dtype=np.int64).tobytes())

    def hold_to(self, vocabulary: int) -> None:
        """As of `decoding.proposal.Bounded`."""
        check_ids([self._highest], vocabulary, "a reference of llma")

    def salt(self) -> int:
        """As of `decoding.proposal.Remembering`: the target may have written the references."""
        return self._salt

    def find(self) -> tuple[Tensor, Tensor]:
        """What follows the longest match in the references: tokens [B, K], how many [B]."""
        match_B = self._index.find(self._history.recent(self.longest), self.shortest)
        end_B = torch.full_like(match_B, self._source_1L.shape[1])
        return copy_after(self._source_1L, match_B, self.draft_length, end_B)


SEPARATOR = -1


class GramIndex:
    """The strings of 1 to `longest` tokens that a text has with a token behind them, and where each ends first."""

    def __init__(self, text: Sequence[int], longest: int, device: torch.device | str) -> None:
        """`text`: documents with a separator (-1) behind each; no string runs across one."""
        tokens_L = np.asarray(text, dtype=np.int64)
        self._base = int(tokens_L.max(initial=0)) + 1
        self._tables = [
            (torch.from_numpy(keys_U).to(device), torch.from_numpy(first_U).to(device))
            for keys_U, first_U in _count(tokens_L, longest, self._base)
        ]

    def find(self, recent_BM: Tensor, shortest: int) -> Tensor:
        """Where the longest known end of a row ends first in the text; -1 for none. int64 [B].

        Args:
            recent_BM: int64, the row's last tokens, the newest first; -1 before its first.
            shortest: tokens that an end must have.
        """
        found_B = torch.full_like(recent_BM[:, 0], -1)
        number_B = torch.zeros_like(found_B)
        known_B = torch.ones_like(found_B, dtype=torch.bool)
        for length, (keys_U, first_U) in enumerate(self._tables, 1):
            token_B = recent_BM[:, length - 1]
            key_B = number_B * self._base + token_B
            at_B = torch.searchsorted(keys_U, key_B).clamp_max(len(keys_U) - 1)
            # an id beyond those of the text would be taken for another string
            known_B = known_B & (token_B >= 0) & (token_B < self._base) & (keys_U[at_B] == key_B)
            number_B = torch.where(known_B, at_B, 0)
            if length >= shortest:
                found_B = torch.where(known_B, first_U[at_B], found_B)
        return found_B


def _count(tokens_L: NDArray[np.int64], longest: int, base: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For every length the keys of the strings, sorted, and where each ends first; [U] each, without empty ones."""
    behind_L = np.append(tokens_L[1:], SEPARATOR)
    end_X = np.flatnonzero((tokens_L != SEPARATOR) & (behind_L != SEPARATOR)).astype(np.int64)
    number_X = np.zeros(len(end_X), dtype=np.int64)
    tables = []
    for length in range(1, longest + 1):
        start_X = end_X - length + 1
        front_X = np.where(start_X >= 0, tokens_L[start_X.clip(0)], SEPARATOR)
        end_X, key_X = end_X[front_X >= 0], (number_X * base + front_X)[front_X >= 0]
        if not len(end_X):
            break
        # the first of equal keys, as ends are in order
        keys_U, first_U, inverse_X = np.unique(key_X, return_index=True, return_inverse=True)
        number_X = inverse_X.astype(np.int64)
        tables.append((keys_U, end_X[first_U]))
    return tables
