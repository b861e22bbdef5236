"""Drafting by copying: what followed the last few tokens when they occurred before.

Prompt lookup copies from the row's own history, which it searches whole, LLMA from reference documents, of which
it has an index. Both look on the device, without a model. Read next: `prompt_lookup.py`, `../extras/llma.py`.

Shapes: B rows, K drafted tokens, L tokens of the source (1 row where all rows share it),
M tokens of the longest suffix that is looked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...decoding.proposal import Committed, DraftSampling, Proposal
from ...decoding.random import Uniforms
from ...decoding.rows import cached_range
from ...decoding.sampling import Warper
from ...decoding.tree.tree import chain
from ..history import History


class ChainLookup(ABC):
    """Drafts a chain of tokens found in a table or a text; a row may find fewer, or none."""

    replayable = True
    draft_steps = 0

    def __init__(self, draft_length: int, device: torch.device | str) -> None:
        self.draft_length, self._device = draft_length, device

    @property
    def nodes(self) -> int:
        """Most nodes of a proposal, the root included."""
        return self.draft_length + 1

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        self._history = History(prompts, room + self.draft_length + 2, self._device)
        self._static = static

    def propose(self, last_B: Tensor, _warper: Warper, _uniforms: Uniforms) -> Proposal:
        """The tokens found, as a point mass at every temperature."""
        self._history.write_last(last_B)
        tokens_BK, count_B = self.find()
        # unless shapes are fixed, columns that no row has filled are left out
        length = self.draft_length if self._static else max(count_B.tolist())
        at_N = cached_range(length + 1, last_B.device)
        tokens_BN = torch.cat([last_B[:, None], tokens_BK[:, :length]], 1)
        present_BN = at_N <= count_B[:, None]
        # absent nodes are computed too: any valid id will do
        tokens_BN = torch.where(present_BN, tokens_BN, 0)
        return Proposal(tokens_BN, chain(length), DraftSampling.POINT_MASS, present_BN=present_BN, coins=self.nodes)

    @abstractmethod
    def find(self) -> tuple[Tensor, Tensor]:
        """What may follow the history: tokens [B, K], and how many of them were found [B]."""

    def observe(self, committed: Committed) -> None:
        """Continue after what was committed."""
        self._history.append(committed)


def suffix_run(source_BL: Tensor, recent_BM: Tensor) -> Tensor:
    """How many of the recent tokens (newest first) the source has up to each position. [B, L]."""
    alike_BL = source_BL == recent_BM[:, :1]
    run_BL = alike_BL.long()
    for back in range(1, recent_BM.shape[1]):
        shifted_BL = nn.functional.pad(source_BL, (back, 0), value=-2)[:, : source_BL.shape[1]]
        alike_BL = alike_BL & (shifted_BL == recent_BM[:, back : back + 1])
        run_BL = run_BL + alike_BL
    return run_BL


def best_match(run_BL: Tensor, allowed_BL: Tensor, *, shortest: int, latest: bool) -> Tensor:
    """Position where the longest allowed run ends, the first or the latest of equals; -1 if none. [B]."""
    L = run_BL.shape[1]
    at_L = torch.arange(L, device=run_BL.device)
    order_L = at_L if latest else L - 1 - at_L
    fits_BL = allowed_BL & (run_BL >= shortest)
    score_BL = torch.where(fits_BL, run_BL * L + order_L, -1)
    best = score_BL.max(1)
    return torch.where(best.values >= 0, best.indices, -1)


def copy_after(source_BL: Tensor, match_B: Tensor, count: int, end_B: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens after a match up to `end_B` or a separator (-1), and how many. [B, K], [B]."""
    slots_BK = (match_B + 1)[:, None] + cached_range(count, match_B.device)
    wide_BL = source_BL.expand(len(match_B), -1)
    tokens_BK = wide_BL.gather(1, slots_BK.clamp(0, source_BL.shape[1] - 1))
    good_BK = (slots_BK < end_B[:, None]) & (tokens_BK >= 0) & (match_B >= 0)[:, None]
    return tokens_BK, good_BK.long().cumprod(1).sum(1)
