"""Packed rows for tests of masks behind a text."""

from __future__ import annotations

import torch
from conftest import VOCABULARY
from draftsmith.trainers.loop.objective import Batch

MASK = VOCABULARY - 1


def packed(lengths: list[int], *, seed: int = 0, unlabelled: float = 0.2) -> Batch:
    """One row of documents; no document's first token is a label."""
    g = torch.Generator().manual_seed(seed)
    S = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {
        "input_ids": torch.randint(0, MASK, (1, S), generator=g),
        "positions": positions[None],
        "documents": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None],
        "loss_mask": ((torch.rand(S, generator=g) >= unlabelled) & (positions > 0))[None],
    }
