"""The rows of a running batch, on the device: what was emitted, what ends a row.

Nothing here waits for the device: by a `DelayedRead` the host sees one step later that all rows have ended. Read
next: `engine.py`.

Shapes: B rows, E tokens that a step can emit, O tokens of the longest answer and one slot for tokens
beyond it, Z ids that end a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


class Rows:
    """State per row, updated in place so that a recorded step can be replayed."""

    def __init__(self, lengths: Sequence[int], limit: int, eos_ids: Sequence[int], device: torch.device) -> None:
        """`lengths`: tokens of every prompt; `limit`: tokens that a row may emit."""
        B = len(lengths)
        self.limit = limit
        self.lengths_B = torch.tensor(lengths, device=device)
        """Tokens in the KV cache."""
        self.last_B = torch.zeros(B, dtype=torch.long, device=device)
        """Emitted, not yet in the KV cache."""
        self.count_B = torch.zeros(B, dtype=torch.long, device=device)
        self.done_B = torch.zeros(B, dtype=torch.bool, device=device)
        self.kept_B = torch.zeros_like(self.count_B)
        """Tokens that the last `emit` has kept."""
        self._eos_Z = torch.tensor(list(eos_ids), dtype=torch.long, device=device)
        self._tokens_BO = torch.zeros(B, limit + 1, dtype=torch.long, device=device)

    def begin(self, first_B: Tensor) -> None:
        """Emit the first token, which the prefill yields."""
        self.last_B.copy_(first_B)
        self.emit(first_B[:, None], torch.ones_like(first_B))

    def emit(self, tokens_BE: Tensor, count_B: Tensor) -> None:
        """Append the first `count_B` tokens up to EOS and the limit; `count_B` is 0 for a row that has ended."""
        E = tokens_BE.shape[1]
        at_E = cached_range(E, tokens_BE.device)
        kept_B = torch.minimum(count_B, self.limit - self.count_B)
        if len(self._eos_Z):
            ends_BE = (tokens_BE[..., None] == self._eos_Z).any(-1)
            # up to the first that ends the row, which itself is kept
            end_B = torch.where(ends_BE, at_E, E).amin(1)
            self.done_B |= end_B < kept_B
            kept_B = torch.minimum(kept_B, end_B + 1)
        # what is not kept lies behind the row's end until the next tokens go there; the last slot is never read
        slot_BE = (self.count_B[:, None] + at_E).clamp_max(self.limit)
        self._tokens_BO.scatter_(1, slot_BE, tokens_BE)
        self.kept_B = kept_B
        self.count_B += kept_B
        self.done_B |= self.count_B >= self.limit

    def answers(self) -> list[list[int]]:
        """The tokens, row by row; waits for the device."""
        counts = self.count_B.tolist()
        return [row[:count] for row, count in zip(self._tokens_BO.tolist(), counts, strict=True)]


@cache
def cached_range(count: int, device: torch.device) -> Tensor:
    """0, 1, ..., `count` - 1, int64. Made once, because every step asks for the same few."""
    return torch.arange(count, device=device)


def overwrite(old: Tensor, where_B: Tensor, new: Tensor) -> None:
    """Put `new` in place of `old` where the condition holds; `old` keeps its address, which recorded steps read."""
    torch.where(where_B, new, old, out=old)


class DelayedRead:
    """A value on the device, read by the host at once or one step late.

    A delayed `read` starts the copy of this step's value and returns that of the step before, which has arrived by
    then. So the host does not wait, and the device has the next step to work on.
    """

    def __init__(self, delayed: bool) -> None:
        self.delay = int(delayed)
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None

    def read(self, value: Tensor) -> Tensor | None:
        """The newest value that can be had without waiting; None before the first one."""
        if not self.delay:
            return value
        earlier, self._pending = self._pending, self._start(value)
        if earlier is None:
            return None
        if earlier[1] is not None:
            earlier[1].synchronize()
        return earlier[0]

    def _start(self, value: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if value.device.type != "cuda":
            return value.clone(), None
        copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        copy.copy_(value, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return copy, event
