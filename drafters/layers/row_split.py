"""A row's positions over several processes (context parallelism), for drafters of one layer.

Each process of a group has a part of every row, side by side in the order of the text. Across positions
such a drafter reads the first pass's keys and values alone, so those are gathered, with their gradient;
what a later pass reads of the tokens behind a part (embeddings, the target's states, labels) every process
has by itself, a halo of as many tokens as there are passes. Ring or all-to-all attention would move more.
Read next: `passes.py`, where keys are gathered; `trainers/student/compared.py`, what a part is compared with.

Shapes: B rows, G heads, S positions of a row, L of them in this process's part, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...errors import RequestError


@dataclass(frozen=True)
class RowSplit:
    """Which part of every row this process has."""

    rank: int = 0
    """Of this process in its group."""
    parts: int = 1
    """Processes of the group."""
    group: Any = None
    """Their `ProcessGroup`; None where rows are whole."""

    def own(self, length: int) -> slice:
        """The positions of this process, of rows of `length`; parts differ by one position at most.

        Raises:
            RequestError: there are fewer positions than processes.
        """
        return self.part_of(self.rank, length)

    def held(self, length: int, ahead: int) -> slice:
        """Its positions and the halo: `ahead` more behind them, as far as the row goes."""
        own = self.own(length)
        return slice(own.start, min(length, own.stop + ahead))

    def gathered(self, x_BGLD: Tensor, length: int) -> Tensor:
        """What all processes of the group have, in the order of the row: [B, G, S, D].

        All of them have to call it together, and go through its gradient together: that of a part is the
        sum of what every process makes of it.
        """
        gathered: Tensor = _Gathered.apply(x_BGLD, self, length)
        return gathered

    def part_of(self, rank: int, length: int) -> slice:
        """The positions of a process of the group; errors as above."""
        if length < self.parts:
            raise RequestError(
                f"rows of {length} tokens cannot be cut over {self.parts} processes; lower loop.context_parallel, or "
                "raise data.sequence_length"
            )
        return slice(rank * length // self.parts, (rank + 1) * length // self.parts)


WHOLE = RowSplit()
"""Every process has whole rows."""


def joined(parts: int, bound: timedelta) -> RowSplit:
    """The part of this process, where neighbours by rank are groups of `parts`. All processes call it together.

    Args:
        bound: how long one process of a group waits for another.
    """
    group, _ = dist.new_subgroups(parts, timeout=bound)
    return RowSplit(dist.get_rank(group), parts, group)


class _Gathered(torch.autograd.Function):
    """An all-gather along positions; its gradient is a sum over processes, cut to the own part.

    torch's own (`torch.distributed.nn.functional.all_gather`) takes a rank of the group for one of all
    processes where there is no NCCL, and fails for every group but the first.
    """

    @staticmethod
    def forward(ctx: Any, x_BGLD: Tensor, split: RowSplit, length: int) -> Tensor:
        ctx.split, ctx.length = split, length
        parts = [split.part_of(rank, length) for rank in range(split.parts)]
        sizes = [part.stop - part.start for part in parts]
        # a collective wants pieces of equal size
        own = F.pad(x_BGLD, (0, 0, 0, max(sizes) - x_BGLD.shape[2])).contiguous()
        pieces = [torch.empty_like(own) for _ in parts]
        dist.all_gather(pieces, own, group=split.group)
        return torch.cat([piece[:, :, :size] for piece, size in zip(pieces, sizes, strict=True)], 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_BGSD,) = grads
        # summed in fp32 at least: in one process a kernel does so, before it rounds
        total_BGSD = grad_BGSD.to(torch.promote_types(grad_BGSD.dtype, torch.float32), copy=True)
        total_BGSD = total_BGSD.contiguous()
        dist.all_reduce(total_BGSD, group=ctx.split.group)
        return total_BGSD[:, :, ctx.split.own(ctx.length)].to(grad_BGSD.dtype), None, None
