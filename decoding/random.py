"""Random numbers per row, so that a row draws the same numbers in any batch.

Every row has its own generator, seeded from (seed, request). Numbers are made in blocks and
copied to the device before they are needed, so taking some neither waits nor copies.
Read next: `engine.py`, which draws with them; `graphs.py`, which holds a step's numbers in place.

Shapes: B rows, R numbers of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

_BLOCK = 512


def salted(seed: int, salt: int) -> int:
    """A seed whose streams have nothing in common with those of `seed`; `seed` itself where `salt` is 0."""
    if not salt:
        return seed
    return int.from_bytes(blake2b(f"{seed}/{salt}".encode(), digest_size=8).digest(), "big")


FOR_TRAINING = 1
"""The salt of texts that drafters learn: who decodes with the same seed must not meet the numbers behind them."""


def salt_of(*parts: bytes) -> int:
    """A salt that differs if one of the parts differs; never 0."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return int.from_bytes(digest.digest(), "big") | 1


class Uniforms:
    """Uniform numbers in [0, 1), fp64, one independent stream per row."""

    def __init__(self, seed: int, requests: Sequence[int], device: torch.device | str) -> None:
        """`requests` numbers the rows: the same number and seed give the same stream."""
        # as uint64: a list with a number from 2**63 on would become floats, and streams fall together
        keys = [np.array([seed & (2**64 - 1), request], dtype=np.uint64) for request in requests]
        self._streams = [np.random.Generator(np.random.Philox(key=key)) for key in keys]
        self._device = torch.device(device)
        self._block_BR = torch.empty(len(self._streams), 0, dtype=torch.float64, device=device)
        self._at = 0

    def take(self, count: int) -> Tensor:
        """The next `count` numbers of every row, [B, count]."""
        if self._at + count > self._block_BR.shape[1]:
            rest_BR = self._block_BR[:, self._at :]
            self._block_BR = torch.cat([rest_BR, self._more(max(count, _BLOCK))], 1)
            self._at = 0
        self._at += count
        return self._block_BR[:, self._at - count : self._at]

    def _more(self, count: int) -> Tensor:
        block_BR = torch.from_numpy(np.stack([each.random(count) for each in self._streams]))
        if self._device.type == "cpu":
            return block_BR
        return block_BR.pin_memory().to(self._device, non_blocking=True)


class SharedStream(Uniforms):
    """One generator for all rows: exact enumeration has too many rows for one each."""

    def __init__(self, seed: int, rows: int, device: torch.device | str = "cpu") -> None:
        """The same numbers on every device."""
        self._generator, self._rows = torch.Generator().manual_seed(seed), rows
        self._device = torch.device(device)

    def take(self, count: int) -> Tensor:
        """The next `count` numbers of every row, [B, count]."""
        numbers_BR = torch.rand(self._rows, count, generator=self._generator, dtype=torch.float64)
        return numbers_BR.to(self._device)
