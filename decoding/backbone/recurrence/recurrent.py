"""States of recurrent layers, slot by slot, as a rollback of the text needs them.

A state-space layer, linear attention or a short convolution keeps one state instead of keys and values. The
whole text is folded into it and cannot be unfolded. So the states after the last tokens are kept side by
side: node n of a tree leaves its state in the slot where attention keeps its keys, a forward begins at the
state one slot before its first token, and a rollback is a smaller length here as well. Slots are taken in
turn, as many as a forward may go back, and a convolution's inputs lie in slots of the same count. Read
next: `scan.py`, which computes a state per node; `../kv_cache.py`, whose part this is.

Shapes: B rows, N nodes, W slots taken in turn, D depths of a path, C channels of a convolution, K its width.
"""

from __future__ import annotations

import torch
from torch import Tensor


class _Turn:
    """Tensors [B, W, ...] of the last W slots: slot s lies at s mod W."""

    def __init__(self, like: Tensor, rows: int, slots: int) -> None:
        """`like`: [any, any, ...], one number or more of what a slot holds."""
        self.slots = slots
        self._held = like.new_zeros(rows, slots, *like.shape[2:])

    def write(self, rows_B1: Tensor, slots_BX: Tensor, values_BX: Tensor) -> None:
        self._held[rows_B1, slots_BX % self.slots] = values_BX.to(self._held.dtype)

    def read(self, rows_B1: Tensor, slots_BX: Tensor) -> Tensor:
        """[B, X, ...]; zeros for slots before the text."""
        values_BX = self._held[rows_B1, slots_BX % self.slots]
        inside_BX = (slots_BX >= 0).view(*slots_BX.shape, *[1] * (values_BX.ndim - 2))
        return values_BX.where(inside_BX, 0)


class RecurrentStates:
    """What recurrent layers keep of the text of every row.

    A layer is named by its index and, where it has several, the number of its state.
    """

    def __init__(self, rows: int, rollback: int) -> None:
        """`rollback`: most nodes of a forward, and most tokens that a later one may begin behind its end."""
        self.rows, self.rollback = rows, rollback
        self._convolved: dict[tuple[int, int], _Turn] = {}
        self._folded: dict[tuple[int, int], _Turn] = {}
        self._row: int | None = None
        self._lengths_B: Tensor | None = None
        self._ends = [0] * rows

    def aim(self, lengths_B: Tensor, count: int, *, check: bool) -> None:
        """Let the next forward begin after `lengths_B` and leave `count` states per row.

        `check`: whether the host may wait for the device to look at the lengths.
        """
        self._row, self._lengths_B = None, lengths_B
        if not self._convolved:
            return
        if count > self.rollback:
            raise ValueError(f"{count} nodes, and the KV cache keeps the states of {self.rollback}")
        if check:
            starts = lengths_B.tolist()
            if any(end - start > self.rollback for start, end in zip(starts, self._ends, strict=True)):
                raise ValueError(f"a rollback of more than {self.rollback} tokens, and no states from before these")
            self._ends = [start + count for start in starts]

    def aim_at_row(self, row: int, count: int) -> None:
        """Let the next forward hold that row alone, from its first token on."""
        self._row, self._lengths_B = row, None
        self._ends[row] = count

    def convolved(self, layer: tuple[int, int], new_BCN: Tensor, width: int) -> Tensor:
        """Keep a convolution's new inputs; these behind the K - 1 before them, [B, C, K - 1 + N]."""
        new_BNC = new_BCN.transpose(1, 2)
        if layer not in self._convolved:
            self._convolved[layer] = _Turn(new_BNC, self.rows, self.rollback + width - 1)
        turn, N = self._convolved[layer], new_BNC.shape[1]
        rows_B1, start_B1 = self._place(new_BNC.device)
        before_BKC = turn.read(rows_B1, start_B1 + torch.arange(1 - width, 0, device=new_BNC.device))
        kept = min(N, turn.slots)  # of a prompt those that later tokens can see
        last_BX = start_B1 + torch.arange(N - kept, N, device=new_BNC.device)
        turn.write(rows_B1, last_BX, new_BNC[:, N - kept :])
        return torch.cat((before_BKC, new_BNC), 1).transpose(1, 2)

    def before(self, layer: tuple[int, int], like: Tensor) -> Tensor:
        """The states [B, ...] that the running forward begins at; zeros shaped as `like` where there is no text."""
        if layer not in self._folded:
            return torch.zeros_like(like)
        rows_B1, start_B1 = self._place(like.device)
        return self._folded[layer].read(rows_B1, start_B1 - 1)[:, 0]

    def keep(self, layer: tuple[int, int], states_BN: Tensor, *, first: int = 0) -> None:
        """Keep the states [B, N, ...] after tokens `first`, `first + 1`, ... of the running forward."""
        if layer not in self._folded:
            self._folded[layer] = _Turn(states_BN, self.rows, self.rollback + 1)
        rows_B1, start_B1 = self._place(states_BN.device)
        at_N = torch.arange(first, first + states_BN.shape[1], device=states_BN.device)
        self._folded[layer].write(rows_B1, start_B1 + at_N, states_BN)

    def commit(self, into_BD: Tensor, from_BD: Tensor) -> None:
        """Move what lies in slots `from_BD` to `into_BD`; everything is read before it is written over."""
        rows_B1 = torch.arange(self.rows, device=into_BD.device)[:, None]
        for turn in (*self._convolved.values(), *self._folded.values()):
            turn.write(rows_B1, into_BD, turn.read(rows_B1, from_BD))

    def _place(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows of the running forward, and the slot of its first token in each, [B, 1]."""
        if self._lengths_B is None:
            row_11 = torch.full((1, 1), self._row or 0, device=device)
            return row_11, torch.zeros_like(row_11)
        return torch.arange(self.rows, device=device)[:, None], self._lengths_B[:, None]
