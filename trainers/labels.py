"""Which positions have a label several tokens ahead, shared by heads and EAGLE drafters.

Read next: `heads.py` and `eagle_common.py`; `loop/objective.py`, the labels one token ahead.

Shapes: R rows, S tokens of a row, X positions that have a token so far ahead,
P of them with a label.
"""

from __future__ import annotations

from torch import Tensor

from ..decoding.on_host import on_host, places
from .loop.objective import Batch


def has_label(batch: Batch, ahead: int) -> Tensor:
    """Positions t whose token t + `ahead` counts in the loss and is of t's own document.

    bool [R, X], X = S - `ahead`; in a row no longer than that there is none. Medusa's head k speaks
    of t + k + 1; EAGLE's output at t has seen token t + 1 and speaks of t + 2.
    """
    return _has_label(batch["documents"], batch["loss_mask"], ahead)


def label_places(batch: Batch, ahead: int, own: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Where `has_label` is true, rows and positions [P], counted on the host, which need not wait for them.

    Args:
        own: the positions of every row that are asked for; places are counted from its start.
    """
    counts_RX = _has_label(on_host(batch["documents"]), on_host(batch["loss_mask"]), ahead)
    row_P, at_P = places(counts_RX[:, own], batch["documents"].device)
    return row_P, at_P


def _has_label(documents_RS: Tensor, loss_mask_RS: Tensor, ahead: int) -> Tensor:
    same_RX = documents_RS[:, ahead:] == documents_RS[:, :-ahead]
    return loss_mask_RS[:, ahead:] & same_RX
