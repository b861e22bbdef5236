"""Loss weights of the positions that a drafter predicts together: fixed, or by how far it gets.

D-PACE (Wu et al. 2026, arXiv 2605.18810) weighs position j by its share in the gradient of the
expected number of accepted tokens. Read next: `medusa.py` and `eagle.py`, whose heads and passes
are the positions; `losses/chunked.py`, which gives q(label).

Shapes: A anchors (positions from which drafts begin), J positions of a draft (its heads or passes), R
rows, X positions of a row, P positions that count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def d_pace(q_AJ: Tensor, known_AJ: Tensor, floor: float) -> Tensor:
    """w_j = sum_{m >= j} prod_{i <= m} q'_i, q' = (1 - floor) q + floor: equations 7 and 8.

    The product is the probability that the draft is accepted up to position m; the sum from j on is
    the value of a right token at j. A position without a label, after the end of a text or in a prompt,
    neither ends a draft nor has a value.

    Args:
        q_AJ: q(label), the probability of each label under the draft.
        known_AJ: bool, where there is a label.
        floor: in (0, 1]; without it far positions would learn nothing until near ones are right.

    Returns:
        fp32 [A, J], without a gradient; 0 where there is no label.
    """
    q_AJ = q_AJ.detach()
    passed_AJ = torch.where(known_AJ, (1 - floor) * q_AJ + floor, torch.ones_like(q_AJ))
    survival_A = torch.ones_like(q_AJ[:, 0])
    survivals = []
    for j in range(q_AJ.shape[1]):  # J is small, and cumulative sums on GPUs are not repeatable
        survival_A = survival_A * passed_AJ[:, j]
        survivals.append(survival_A * known_AJ[:, j])
    values = [torch.zeros_like(survival_A)]
    for survival_A in reversed(survivals):
        values.append(values[-1] + survival_A)
    return torch.stack(values[:0:-1], 1) * known_AJ


def joined(place: tuple[Tensor, Tensor], length: int) -> Tensor:
    """Rows and positions [P] as indices, in rows of `length` tokens joined end to end."""
    row_P, at_P = place
    return row_P * length + at_P


def paced(q: Sequence[Tensor], anchors: Sequence[Tensor], count: int, floor: float) -> list[Tensor]:
    """`d_pace` for J positions with anchors of their own each: weights in the same shape.

    Args:
        q: q(label) [P_j] of every position.
        anchors: int64 [P_j], which of the `count` anchors each belongs to.
        count: A.
        floor: as in `d_pace`.
    """
    q_AJ = q[0].new_zeros(count, len(q))
    known_AJ = torch.zeros_like(q_AJ, dtype=torch.bool)
    for j, (q_P, anchor_P) in enumerate(zip(q, anchors, strict=True)):
        q_AJ[anchor_P, j] = q_P
        known_AJ[:, j].index_fill_(0, anchor_P, True)  # by assignment the host would send a number and wait
    weight_AJ = d_pace(q_AJ, known_AJ, floor)
    return [weight_AJ[anchor_P, j] for j, anchor_P in enumerate(anchors)]


def geometric(place_P: Tensor, decay: float) -> Tensor | None:
    """`decay`^j of position j, fp32 [P]; None where all count alike."""
    return None if decay == 1 else decay**place_P
