"""LLMA: copy from a reference document where it has the last tokens of the text.

Yang et al. 2023 (arXiv 2304.04487): a match of one token triggers, the longest of up to 5 is
preferred, 20 tokens are verified, the current one included. Read next: `lookup.py`.

Shapes: B rows, K drafted tokens, L tokens of all references.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .lookup import ChainLookup, best_match, copy_after, suffix_run


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
        """`references`: token ids of the documents; `longest`, `shortest`: tokens that match."""
        super().__init__(draft_length, device)
        self.longest, self.shortest = longest, shortest
        flat = [token for document in references for token in (*document, -1)]
        self._source_1L = torch.tensor([flat or [-1]], dtype=torch.long, device=device)

    def find(self) -> tuple[Tensor, Tensor]:
        """What follows the longest match in the references: tokens [B, K], how many [B]."""
        recent_BM = self._history.recent(self.longest)
        source_BL = self._source_1L.expand(len(recent_BM), -1)
        # a recent token before a row's first is -1, like a separator: never a match
        run_BL = suffix_run(source_BL, torch.where(recent_BM < 0, -3, recent_BM))
        match_B = best_match(run_BL, torch.ones_like(run_BL, dtype=torch.bool), shortest=self.shortest, latest=False)
        end_B = torch.full_like(match_B, source_BL.shape[1])
        return copy_after(source_BL, match_B, self.draft_length, end_B)
