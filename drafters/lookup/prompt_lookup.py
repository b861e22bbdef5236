"""Prompt lookup decoding: copy what followed the last tokens earlier in the same text.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding): n-grams of up to 3 tokens, 10 tokens
copied, the first match. `transformers` looks for up to 2 and copies 10. Read next: `lookup.py`.

Shapes: B rows, K drafted tokens, L tokens of history.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .lookup import ChainLookup, best_match, copy_after, suffix_run


class PromptLookup(ChainLookup):
    """Copies from prompt and answer so far."""

    family = "prompt-lookup"

    def __init__(
        self,
        *,
        draft_length: int = 10,
        longest: int = 3,
        shortest: int = 1,
        latest: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """`longest`, `shortest`: tokens that have to match; `latest`: of equal matches the last."""
        super().__init__(draft_length, device)
        self.longest, self.shortest, self.latest = longest, shortest, latest

    def find(self) -> tuple[Tensor, Tensor]:
        """What followed the longest earlier match: tokens [B, K], how many [B]."""
        history = self._history
        run_BL = suffix_run(history.tokens_BL, history.recent(self.longest))
        at_L = torch.arange(run_BL.shape[1], device=run_BL.device)
        # the suffix itself is no match: a token has to follow
        earlier_BL = at_L < history.lengths_B[:, None]
        match_B = best_match(run_BL, earlier_BL, shortest=self.shortest, latest=self.latest)
        return copy_after(history.tokens_BL, match_B, self.draft_length, history.lengths_B + 1)
