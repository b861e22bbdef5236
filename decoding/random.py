"""Random numbers per row, so that a row draws the same whoever shares its batch.

Every row has a generator of its own, seeded from (seed, request); each draw is fresh.
Read next: `engine.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Uniforms:
    """Uniform numbers in [0, 1), fp64, one independent stream per row."""

    def __init__(self, seed: int, requests: Sequence[int], device: torch.device | str) -> None:
        """`requests` numbers the rows: the same number and seed give the same stream."""
        self._streams = [
            np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), request]))
            for request in requests
        ]
        self._device = device

    def take(self, count: int) -> Tensor:
        """The next `count` numbers of every row, [B, count]."""
        block: NDArray[np.float64] = np.stack([s.random(count) for s in self._streams])
        return torch.from_numpy(block).to(self._device)
