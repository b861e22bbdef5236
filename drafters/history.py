"""The text of every row so far, on the device, for drafters that copy from it or read it later.

Read next: `model/draft_model.py`, `lookup/lookup.py`.

Shapes: B rows, L slots of history, E tokens that a step can emit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..decoding.proposal import Committed
from ..decoding.rows import cached_range


class History:
    """Prompt and emitted tokens of every row, updated in place."""

    def __init__(self, prompts: Sequence[Sequence[int]], room: int, device: torch.device | str) -> None:
        """`room`: tokens that may follow the longest prompt, those of a cut-off step included."""
        capacity = max(map(len, prompts)) + room
        padded = [[*prompt, *[0] * (capacity - len(prompt))] for prompt in prompts]
        self.tokens_BL = torch.tensor(padded, dtype=torch.long, device=device)
        self.lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
        """Tokens before the last emitted one."""

    def write_last(self, last_B: Tensor) -> None:
        """Put the last emitted token after the others."""
        self.tokens_BL.scatter_(1, self.lengths_B[:, None], last_B[:, None])

    def append(self, committed: Committed) -> None:
        """Take in a step; garbage after `count_B` is overwritten by the next one."""
        E = committed.tokens_BE.shape[1]
        slots_BE = (self.lengths_B + 1)[:, None] + cached_range(E, self.lengths_B.device)
        slots_BE = slots_BE.clamp_max(self.tokens_BL.shape[1] - 1)
        self.tokens_BL.scatter_(1, slots_BE, committed.tokens_BE)
        self.lengths_B += committed.count_B

    def recent(self, count: int) -> Tensor:
        """The last `count` tokens, the newest first; -1 before a row's first. [B, count]."""
        slots_BK = self.lengths_B[:, None] - cached_range(count, self.lengths_B.device)
        recent_BK = self.tokens_BL.gather(1, slots_BK.clamp_min(0))
        return torch.where(slots_BK >= 0, recent_BK, -1)

    def unread(self, known: Sequence[int]) -> list[list[int]]:
        """What every row has behind its first `known` tokens, the last emitted one included; the host waits for it.

        A row that has ended has nothing new. A step adds few tokens, so few are read.
        """
        new = [length + 1 - count for length, count in zip(self.lengths_B.tolist(), known)]
        recent = self.recent(max(new)).tolist()
        return [tokens[:count][::-1] for count, tokens in zip(new, recent)]
