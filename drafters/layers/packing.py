"""Documents of packed rows, side by side with those of like length, and back in their rows.

Read next: `passes.py`, which attends to them so.

Shapes: B rows, S pairs of a row, N of them in the own part (all, but for a row that is cut), X = B N of them, G heads,
D head size, K documents of a group, L pairs of the longest, T keys of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...decoding.on_host import on_host, sent


class Packing:
    """Documents of rows, taken apart into groups of like length and put together again.

    The longest of a group is less than twice as long as any other, so that padding at most doubles
    what a group holds; and there are few groups. Neighbours with the same number are a document. Of rows
    that are cut, one that began in an earlier part is a group of its own, with more keys than queries.
    """

    def __init__(self, documents_BS: Tensor, own: slice | None = None) -> None:
        """`own`: the positions of each row that are taken apart; None: all."""
        numbers_BS, device = on_host(documents_BS), documents_BS.device
        B, S = numbers_BS.shape
        own = slice(0, S) if own is None else own
        N = own.stop - own.start
        self._shape = (B, N)
        start_D, first_D, length_D, before_D = _documents(numbers_BS, own)
        kinds = torch.tensor([int(length).bit_length() for length in length_D.tolist()])
        begun = before_D > 0
        kinds[begun] = -1 - torch.arange(int(begun.sum()))
        self._groups: list[tuple[Tensor, Tensor]] = []
        """[K, L] and [K, T] each: which of the X pairs, and of all pairs of the rows, is there as query and as key;
        0 after the end of a document."""
        slot_X = torch.empty(B * N, dtype=torch.long)
        held = 0
        for kind in kinds.unique().tolist():
            here = kinds == kind
            pair_KL, inside_KL = _placed(first_D[here], length_D[here])
            key_KT, _ = _placed(start_D[here], length_D[here] + before_D[here])
            slot_X[pair_KL[inside_KL]] = held + inside_KL.flatten().nonzero()[:, 0]
            held += pair_KL.numel()
            on_device = sent(pair_KL, device)
            # of whole rows both are the same
            self._groups.append((on_device, on_device if N == S else sent(key_KT, device)))
        self._slot_X = sent(slot_X, device)

    def side_by_side(self, x_BGND: Tensor) -> list[Tensor]:
        """The documents of each group in the own part, [K, G, L, D]; garbage after their ends."""
        return _taken(x_BGND, [pair_KL for pair_KL, _ in self._groups])

    def keys_side_by_side(self, x_BGSD: Tensor) -> list[Tensor]:
        """The same documents from their first pair on, of whole rows, [K, G, T, D]."""
        return _taken(x_BGSD, [key_KT for _, key_KT in self._groups])

    def back(self, groups: Sequence[Tensor]) -> Tensor:
        """[B, G, N, D] of the groups' last L positions: what comes before belongs to no pair."""
        rows = [
            x_KGLD[:, :, -pair_KL.shape[1] :].transpose(1, 2).flatten(0, 1)
            for x_KGLD, (pair_KL, _) in zip(groups, self._groups, strict=True)
        ]
        pairs_XGD = torch.cat(rows).index_select(0, self._slot_X)
        return pairs_XGD.unflatten(0, self._shape).transpose(1, 2)


def _documents(numbers_BS: Tensor, own: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The documents that have a pair in the own part, int64 [documents] each.

    Returns:
        Where each begins, counted through the pairs of whole rows; where its first own pair is, counted through
        own pairs; how many of those it has; and how many pairs stand before them.
    """
    S, N = numbers_BS.shape[1], own.stop - own.start
    first_BS = torch.ones_like(numbers_BS, dtype=torch.bool)
    first_BS[:, 1:] = numbers_BS[:, 1:] != numbers_BS[:, :-1]
    start_D = first_BS.flatten().nonzero()[:, 0]
    row_D, at_D = start_D // S, start_D % S
    end_D = at_D + torch.diff(start_D, append=torch.tensor([numbers_BS.numel()]))
    from_D, to_D = at_D.clamp_min(own.start), end_D.clamp_max(own.stop)
    here = from_D < to_D
    found = (start_D, row_D * N + from_D - own.start, to_D - from_D, from_D - at_D)
    start_D, first_D, length_D, before_D = (each[here] for each in found)
    return start_D, first_D, length_D, before_D


def _placed(start_K: Tensor, length_K: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of so many pairs from each start on, [K, L], 0 behind their ends; and where they are inside, bool."""
    at_L = torch.arange(int(length_K.max()))
    inside_KL = at_L < length_K[:, None]
    return torch.where(inside_KL, start_K[:, None] + at_L, 0), inside_KL


def _taken(x_BGND: Tensor, groups: Sequence[Tensor]) -> list[Tensor]:
    rows_XGD = x_BGND.transpose(1, 2).flatten(0, 1)
    # `index_select`, because indexing by a tensor takes ten times as long on a CPU
    return [
        rows_XGD.index_select(0, pair_KL.flatten()).unflatten(0, pair_KL.shape).transpose(1, 2) for pair_KL in groups
    ]
