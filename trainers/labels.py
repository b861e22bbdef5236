"""Which positions have a label several tokens ahead, shared by heads and EAGLE drafters.

Read next: `heads.py` and `eagle_common.py`; `loop/objective.py`, the labels one token ahead.

Shapes: R rows, S tokens of a row, X positions that have a token so far ahead.
"""

from __future__ import annotations

from torch import Tensor

from .loop.objective import Batch


def has_label(batch: Batch, ahead: int) -> Tensor:
    """Positions t whose token t + `ahead` counts in the loss and is of t's own document.

    bool [R, X], X = S - `ahead`; in a row no longer than that there is none. Medusa's head k speaks
    of t + k + 1; EAGLE's output at t has seen token t + 1 and speaks of t + 2.
    """
    documents_RS = batch["documents"]
    same_RX = documents_RS[:, ahead:] == documents_RS[:, :-ahead]
    return batch["loss_mask"][:, ahead:] & same_RX
