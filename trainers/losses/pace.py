"""Loss weights of the drafts behind one place of the text: a fixed decay, or by how far a drafter gets.

D-PACE (Wu et al. 2026, arXiv 2605.18810) weighs position j by its share in the gradient of the
expected number of accepted tokens, as far as the text's own tokens say. `length_gain` is that gradient by the
target's distributions: with it the total variation's gradient is that of the expected length itself. `reached` is
that of the drafter's own drafts: how often decoding gets to each place of a text that the target wrote.
Read next: `../heads.py` and `../student/compared.py`, whose heads and passes are the positions; `chunked.py`, which
says how likely each draft is accepted.

Shapes: A anchors (positions from which drafts begin), J positions of a draft (its heads or passes), R
rows, X positions of a row, P positions that count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from ..config import ObjectiveConfig
from .mix import Passed, Question

_Draft = TypeVar("_Draft", float, Tensor)


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


def length_gain(alpha_AJ: Tensor, known_AJ: Tensor, floor: float) -> Tensor:
    """g_j = dE / d alpha'_j of the expected accepted length E = sum_m prod_{i <= m} alpha'_i of every draft.

    Up to m all are accepted with that product (Leviathan et al. 2023, theorem 3.5, position by position), where
    alpha_i does not depend on what is drafted in front of it. g is constant for the gradient, so that
    sum_j g_j (1 - alpha_j) has the gradient of -E through all factors. alpha' = (1 - floor) alpha + floor.

    Args:
        alpha_AJ: sum_v min(p, q) of each draft.
        known_AJ: bool, where there is one; others neither end a draft nor have a value.
        floor: in [0, 1]; 0: E as it is.

    Returns:
        fp32 [A, J], without a gradient; 0 where there is no draft.
    """
    passed_AJ = (1 - floor) * alpha_AJ + floor
    weight_AJ, behind_AJ = reached(passed_AJ, passed_AJ, known_AJ, 0.0)
    return weight_AJ + behind_AJ  # itself, and what may follow


def reached(alpha_AJ: Tensor, kept_AJ: Tensor, known_AJ: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """W_j = prod_{i < j} w_i, and G_j = W_j sum_{m > j} prod_{j < i < m} w_i alpha_m, w = min(1, q / p) of the text.

    A chain is drafted and kept as x with prod min(p, q)(x_i) (Leviathan et al. 2023), which is the probability
    prod p(x_i) of that text times its W. So the mean of sum_j W_j alpha_j over texts of the target is the expected
    accepted length of the drafter's own drafts, each place with the target's distribution behind what was drafted;
    its gradient is that of sum_j W_j alpha_j + G_j w_j, with W and G constant.

    Args:
        alpha_AJ: as of `length_gain`.
        kept_AJ: w of each draft.
        known_AJ: as of `length_gain`.
        floor: in [0, 1], as of `length_gain`, of w.

    Returns:
        W and G, fp32 [A, J], without a gradient; 0 where there is no draft.
    """
    alpha_AJ, kept_AJ = alpha_AJ.detach() * known_AJ, kept_AJ.detach()
    passed_AJ = torch.where(known_AJ, (1 - floor) * kept_AJ + floor, torch.ones_like(kept_AJ))
    reached_A, behind_A = torch.ones_like(alpha_AJ[:, 0]), torch.zeros_like(alpha_AJ[:, 0])
    weights, behind = [], []
    for j in range(alpha_AJ.shape[1]):  # no division by w, which may be 0
        weights.append(reached_A)
        reached_A = reached_A * passed_AJ[:, j]
    for j in reversed(range(alpha_AJ.shape[1])):
        behind.append(behind_A)
        behind_A = alpha_AJ[:, j] + passed_AJ[:, j] * behind_A
    weight_AJ = torch.stack(weights, 1) * known_AJ
    return weight_AJ, weight_AJ * torch.stack(behind[::-1], 1)


def joined(place: tuple[Tensor, Tensor], length: int) -> Tensor:
    """Rows and positions [P] as indices, in rows of `length` tokens joined end to end."""
    row_P, at_P = place
    return row_P * length + at_P


def paced(
    passed_P: Tensor,
    anchor_P: Tensor,
    draft_P: Tensor,
    counts: tuple[int, int],
    weigh: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """What `weigh` makes of drafts as a table, one by one, fp32 [P] or [P, 2].

    Args:
        passed_P: what it is given of each, [P] or [P, 2].
        anchor_P: int64, which anchor each belongs to.
        draft_P: int64, which draft behind its anchor it is, from 0.
        counts: A and J.
        weigh: of [A, J] or [A, J, 2], and where there is a draft.
    """
    A, J = counts
    cell_P = anchor_P * J + draft_P
    passed_XJ = passed_P.new_zeros(A * J, *passed_P.shape[1:]).index_copy_(0, cell_P, passed_P)
    # by assignment the host would send a number and wait
    known_AJ = torch.zeros(A * J, dtype=torch.bool, device=passed_P.device).index_fill_(0, cell_P, True).view(A, J)
    return weigh(passed_XJ.view(A, J, *passed_P.shape[1:]), known_AJ).flatten(0, 1)[cell_P]


@dataclass(frozen=True)
class DraftPace:
    """Weights by how far a draft gets, as a recipe asks for them."""

    asks: Passed
    """What is asked of every draft first: `label_q` for `d_pace`, `alpha` for `length_gain`, `kept` for `reached`."""
    floor: float
    tv: float = 0.0
    """Of `reached`, what the accepted length counts in the loss: that of `objective.tv`."""

    @classmethod
    def of(cls, objective: ObjectiveConfig) -> Self | None:
        """None where the weights are fixed."""
        if objective.positions == "geometric":
            return None
        asks = Passed(_ASKS[objective.positions], objective.siblings)
        floor = objective.pace_floor
        return cls(asks, (0.5 if asks.what == "label_q" else 0.0) if floor is None else floor, objective.tv)

    @property
    def by_target(self) -> bool:
        """Whether by the target's distributions; else by the text's own tokens alone."""
        return self.asks.what != "label_q"

    def __call__(self, passed_P: Tensor, anchor_P: Tensor, draft_P: Tensor, counts: tuple[int, int]) -> Tensor:
        """What each draft counts in the loss, [P]; by `reached` [P, 2], as `ChunkedLoss` takes it.

        Args:
            passed_P: what it `asks`; the others as of `paced`.
        """
        return paced(passed_P, anchor_P, draft_P, counts, self._weights)

    def _weights(self, passed_AJ: Tensor, known_AJ: Tensor) -> Tensor:
        if self.asks.what == "label_q":
            return d_pace(passed_AJ, known_AJ, self.floor)
        if self.asks.what == "alpha":
            return length_gain(passed_AJ, known_AJ, self.floor)
        alpha_AJ, kept_AJ = passed_AJ.unbind(-1)
        weight_AJ, gain_AJ = reached(alpha_AJ, kept_AJ, known_AJ, self.floor)
        return torch.stack((weight_AJ, self.tv * gain_AJ), -1)


_ASKS: dict[str, Question] = {"d-pace": "label_q", "accepted": "alpha", "on-policy": "kept"}


def geometric(draft: _Draft, decay: float, *, sum_of: int = 0) -> _Draft | None:
    """What the drafts behind one place count beside each other: each `decay` times the one in front of it.

    This is the one meaning of every `decay` in recipes. What the weights add up to is the published loss's own, a
    factor for all of them: the draft of number 0 counts 1 (EAGLE, P-EAGLE); heads are numbered from 1, so that the
    first counts `decay` (Medusa's lambda_k); MTP's add up to 1, and those of a block drafter's row to its labels
    (`../block/student.py`).

    Args:
        draft: the number of each draft, int64 [P] or one of them.
        decay: at most 1.
        sum_of: so many drafts add up to 1; 0: the one of number 0 counts 1.

    Returns:
        fp32 [P], or one number; None where all count 1.
    """
    if decay == 1 and not sum_of:
        return None
    weight: Any = decay**draft
    return weight / sum(decay**j for j in range(sum_of)) if sum_of else weight
