"""Numbers of positions that are few, for parts that are compiled once per shape.

The number of labels is another in every batch. Zeros behind the last position make it one of few; they count
nowhere. Read next: `chunked.py`, whose chunks are compiled; `../loop/compiled.py`.

Shapes: P positions, X of them with those that stand behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .chunked import Teacher

_SMALLEST = 8
"""A chunk's remainder is made of this part of a chunk and its doubles."""
_STEPS = 4
"""Sizes of what is not cut into chunks: so many equal steps."""


class Positions(NamedTuple):
    """What a loss over positions is given, all of one length."""

    hidden_XH: Tensor
    label_X: Tensor
    teacher: Teacher | None
    share_X: Tensor
    """How much each counts in the loss; 0 of those that stand behind."""
    report_weight_X: Tensor
    """The same of what is reported."""


def whole_chunks(count: int, chunk: int) -> int:
    """The least number of positions from `count` on whose chunks are of few sizes (`chunked._parts`).

    Those are the chunk itself and powers of two from an eighth of it on: at most five.
    """
    least = 1 << max(0, (chunk // _SMALLEST).bit_length() - 1)
    full, rest = divmod(count, chunk)
    return full * chunk + min(chunk, -(-rest // least) * least)


def lengthened(
    hidden_PH: Tensor,
    label_P: Tensor,
    teacher: Teacher | None,
    share_P: Tensor | None,
    report_weight_P: Tensor | None,
    chunk: int,
) -> Positions:
    """The same positions and some behind them that count nowhere, `whole_chunks` in all."""
    count = len(hidden_PH)
    more = whole_chunks(count, chunk) - count
    ones_P = torch.ones(count, device=hidden_PH.device)
    return Positions(
        behind(hidden_PH, more),
        behind(label_P, more),
        None if teacher is None else teacher.lengthened(more),
        behind(ones_P if share_P is None else share_P, more),
        behind(ones_P if report_weight_P is None else report_weight_P, more),
    )


def behind(x_P: Tensor, more: int) -> Tensor:
    """`x_P` with so many zeros behind its first dimension."""
    return F.pad(x_P, [*[0] * (2 * x_P.ndim - 1), more]) if more else x_P


def next_size(count: int, most: int) -> int:
    """The least of few sizes that holds `count` of at most `most` positions."""
    step = -(-most // _STEPS)
    return max(1, -(-count // step)) * step
