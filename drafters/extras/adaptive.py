"""A draft model whose draft length follows the acceptance that each row measures.

With acceptance rate alpha, K drafted tokens yield (1 - alpha^(K+1)) / (1 - alpha) tokens for
1 + K c target calls' time (Leviathan et al. 2023, theorem 3.8); every row takes the K that pays
best by what it has seen so far. K depends on the past alone, so decoding stays lossless.
Read next: `../model/draft_model.py`.

Shapes: B rows, K draft lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ...decoding.proposal import Committed, Proposal
from ...decoding.random import Uniforms
from ...decoding.rows import DelayedRead
from ...decoding.sampling import Warper
from ..model.draft_model import DraftModel
from ..temperatures import Policy


class AdaptiveDraft(DraftModel):
    """Drafts 1 to `longest` tokens per row."""

    family = "adaptive-draft"
    keeps_length = False
    replayable = False  # the host decides how many draft calls there are

    def __init__(
        self,
        backbone: Backbone,
        vocabulary: int,
        *,
        longest: int = 8,
        policy: Policy = "sample",
        factors: Sequence[float] = (),
        cost: float = 0.2,
        decay: float = 0.9,
    ) -> None:
        """`cost`: c, a draft step over a target call; `decay`: weight of the past per step."""
        super().__init__(backbone, vocabulary, draft_length=longest, policy=policy, factors=factors)
        self.cost, self.decay = cost, decay

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows, each with the prior of one acceptance in two tests."""
        super().reset(prompts, room, static=static)
        device = self.backbone.device
        self._passed_B = torch.ones(len(prompts), device=device)
        self._tested_B = torch.full((len(prompts),), 2.0, device=device)
        self._late = DelayedRead(static)
        self._length_B = self._earlier_B = self.plan()

    def plan(self) -> Tensor:
        """The draft length that pays best by each row's own acceptance rate. int64 [B]."""
        alpha_B1 = (self._passed_B / self._tested_B).clamp(0.01, 0.99)[:, None]
        K = torch.arange(1, self.draft_length + 1, device=alpha_B1.device)
        tokens_BK = (1 - alpha_B1 ** (K + 1)) / (1 - alpha_B1)
        return (tokens_BK / (1 + self.cost * K)).argmax(1) + 1

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """A chain as long as the longest row wants; what a row did not want is absent."""
        planned_B = self.plan()
        seen = self._late.read(planned_B.max())
        if self._late.delay:
            # the host knows the plan of the step before, so that one is carried out
            planned_B, self._earlier_B = self._earlier_B, planned_B
        longest = self.draft_length if seen is None else int(seen)
        self._length_B = planned_B
        return self.draft(last_B, warper, uniforms, length=longest, wanted_B=planned_B)

    def observe(self, committed: Committed) -> None:
        """Count accepted and tested tokens of every row, the recent ones most."""
        ran_B = committed.count_B > 0
        accepted_B = committed.count_B - 1
        tested_B = torch.minimum(accepted_B + 1, self._length_B)
        self._passed_B += ran_B * (accepted_B - (1 - self.decay) * self._passed_B)
        self._tested_B += ran_B * (tested_B - (1 - self.decay) * self._tested_B)
        super().observe(committed)
