"""A short convolution along a block's slots, its kernel part fixed and part made of the slot itself.

DFlash 2 (z-lab 2026) puts one around attention and one around the feed-forward part of every layer: slots of a block
hold the same mask, and what tells them apart is where they stand. With y the sublayer's normed input and two taps,

    in_t  = sum_tap (base[0, tap] + D_in[t, tap]) y_{t - tap}
    out_t = sum_tap (base[1, tap] + D_out[t, tap]) s_{t - tap},   s = sublayer(in)

and [D_in, D_out] = P y, a number for each tap and group of channels. A tap reads zero across the beginning of its
block: what stands beside a block in a packed row never enters it. At the start base is 1 at tap 0 and P is zero, so a
new convolution changes nothing. The target's states go through none. Read next: `selected.py`, the network.

Shapes: R rows, N slots, A blocks of a row, B slots of a block, H hidden size, G groups of channels, T taps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GroupedConv(nn.Module):
    """The two convolutions around a sublayer."""

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        """`group`: channels that share what a slot adds to the kernel; it divides `hidden`."""
        super().__init__()
        self.taps, self.groups = taps, hidden // group
        base_2TH = torch.zeros(2, taps, hidden)
        base_2TH[:, 0] = 1
        self.base_kernel = nn.Parameter(base_2TH)
        self.kernel_projection = nn.Linear(hidden, 2 * taps * self.groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, y_RNH: Tensor, sublayer: Callable[[Tensor], Tensor], block: int) -> Tensor:
        """What the sublayer makes of the mixed slots, mixed again: [R, N, H].

        Args:
            y_RNH: normed; N is a multiple of `block`.
            block: slots of a block, B.
        """
        delta = self.kernel_projection(y_RNH).unflatten(-1, (2, self.taps, self.groups))
        mixed_RNH = self._mixed(y_RNH, delta[..., 0, :, :], 0, block)
        return self._mixed(sublayer(mixed_RNH), delta[..., 1, :, :], 1, block)

    def _mixed(self, x_RNH: Tensor, delta_RNTG: Tensor, side: int, block: int) -> Tensor:
        kernel_TGg = self.base_kernel[side].unflatten(-1, (self.groups, -1))
        x_RABGg = x_RNH.unflatten(-1, (self.groups, -1)).unflatten(1, (-1, block))
        delta_RABTG = delta_RNTG.unflatten(1, (-1, block))
        out = (kernel_TGg[0] + delta_RABTG[..., 0, :, None]) * x_RABGg
        for tap in range(1, min(self.taps, block)):
            before = F.pad(x_RABGg[:, :, :-tap], (0, 0, 0, 0, tap, 0))
            out = out + (kernel_TGg[tap] + delta_RABTG[..., tap, :, None]) * before
        return out.flatten(-2).flatten(1, 2)
