"""LLMA: copy from a reference document where it has the last tokens of the text.

Yang et al. 2023 (arXiv 2304.04487): a match of one token triggers, the longest of up to 5 is
preferred, 20 tokens are verified, the current one included. Of several places the first is copied. The work
of a draft does not grow with the references. Read next: `gram_index.py`, where is looked; `lookup.py`.

Shapes: B rows, K drafted tokens, L tokens of all references.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...decoding.random import salt_of
from ..config import check_shortest, check_values
from .gram_index import SEPARATOR, GramIndex
from .lookup import ChainLookup, copy_after
from .tries import check_ids


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
