"""The loss of a draft model that learns a frozen target's distribution, for `distill` and `boost`.

Sources: Hinton et al. 2015; DistillSpec (Zhou et al. 2023) for the forward KL on drafts. Read next:
`../distill.py`; `../losses/mix.py`, the terms; `../losses/ramp.py`, a mix that moves; `../losses/pace.py`, weights by
how far drafts get.

Shapes: R rows, S tokens of a row, X of all rows, P labelled positions, A places that a draft begins behind, D drafted
tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ...drafters.layers.draft_vocabulary import ids_of
from ...drafters.layers.static import StaticParts
from ...drafters.projection import Projection, Shaping
from ...errors import RequestError
from ..config import LoopConfig, ObjectiveConfig
from ..labels import in_front_of_labels, label_places, label_shares, labelled
from ..loop.objective import Batch
from ..losses.chunked import ChunkedLoss, Teacher
from ..losses.mix import OfTarget, drafted
from ..losses.pace import DraftPace, joined
from ..losses.ramp import Ramp
from ..packed.passes import hidden_states
from .draft import rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DraftStudent(StaticParts):
    """The draft and its loss against the target's distribution, in chunks over positions.

    It trains on the mix of the step and is validated on the recipe's own.
    """

    def __init__(self, draft: PreTrainedModel, target: PreTrainedModel, objective: ObjectiveConfig) -> None:
        super().__init__()
        self.draft = draft
        self._ramp, self._steps = Ramp.of(objective), 1
        self.mix = self.step_mix = self._ramp.last
        self._pace, self._length = DraftPace.of(objective), objective.draft_length
        # a head may be padded beyond the tokenizer; the rows that both have are compared
        rows = min(rows_of(draft), rows_of(target))
        head: Any = draft.get_output_embeddings()
        self.head = ChunkedLoss(
            head, self.mix, chunk=objective.chunk, rows=rows, shaping=Shaping.of(draft), over=draft
        )
        self.train()  # a loaded draft comes without dropout, that of its adapter included

    @property
    def cut(self) -> Callable[[Tensor], Any] | None:
        """What the loss needs of the target's logits where the draft has a draft vocabulary; None where not."""
        ids_U = ids_of(self.draft)
        return None if ids_U is None else partial(OfTarget.of, ids_U=ids_U, mix=self.mix)

    def set_steps(self, steps: int) -> None:
        """How many steps the run has: the mix moves over a share of them."""
        self._steps = steps

    def begin_step(self, step: int) -> None:
        """Minimise that step's mix; what is validated is the recipe's at every step."""
        self.step_mix = self._ramp.at(step, self._steps)

    def forward(self, batch: Batch, teacher: Teacher) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_PH, label_P = labelled(hidden_states(self.draft, batch, self.static), batch)
        ids_U = ids_of(self.draft)
        if ids_U is not None:
            label_P = drafted(label_P, ids_U)
        mix = self.step_mix if self.training else self.mix
        share_P = label_shares(batch)
        if self._pace is not None:
            passed_P, _ = self.head(hidden_PH, label_P, teacher, only=self._pace.asks)
            weight_P = as_chains(passed_P, batch, self._length, replace(self._pace, tv=mix.tv))
            share_P = weight_P if share_P is None else weight_P * share_P.view(-1, *[1] * (weight_P.ndim - 1))
        return self.head(hidden_PH, label_P, teacher, share_P, loss=mix)


def as_chains(passed_P: Tensor, batch: Batch, length: int, pace: DraftPace) -> Tensor:
    """What each label of a text counts, where a draft of `length` tokens begins at every place of it, [P] or [P, 2].

    A label is the first token of the draft behind the token in front of it, the second of the one behind the token
    before that, and so on, as far as its document reaches: it counts what it counts in all of them.

    Args:
        passed_P: what the pace asks of every label.
    """
    S = batch["input_ids"].shape[1]
    at_P = joined(cast(tuple[Tensor, Tensor], in_front_of_labels(batch)), S)
    label_X = torch.zeros(batch["input_ids"].numel(), dtype=torch.int64, device=at_P.device)
    label_X.index_copy_(0, at_P, torch.arange(len(at_P), device=at_P.device))
    anchors = [joined(label_places(batch, 1 + j), S) for j in range(length)]
    # of every draft its label's number
    labels = [label_X[anchor_A + j] for j, anchor_A in enumerate(anchors)]
    draft_D = torch.cat([torch.full_like(each, j) for j, each in enumerate(labels)])
    weight_D = pace(passed_P[torch.cat(labels)], torch.cat(anchors), draft_D, (label_X.numel(), length))
    total_P = torch.zeros_like(passed_P)
    for label_A, weight_A in zip(labels, weight_D.split([len(each) for each in labels]), strict=True):
        # one draft's number of each label at most, so that sums have one order
        total_P = total_P + torch.zeros_like(total_P).index_copy_(0, label_A, weight_A)
    return total_P


def check_compiled_mix(loop: LoopConfig, objective: ObjectiveConfig) -> None:
    """Raise RequestError for a loss that is to be compiled and is another one at every step."""
    share = Ramp.of(objective).share
    if loop.compile and share:
        raise RequestError(
            f"loop.compile is on, and the mix of the loss moves over {share:g} of the steps (objective.from_kl_share; "
            "a total variation alone begins so by itself): it would be compiled anew at each. Set "
            "--objective.from_kl_share 0, or leave loop.compile out"
        )


def teacher_of(
    target: PreTrainedModel, hidden_RSH: Tensor, batch: Batch, cut: Callable[[Tensor], Any] | None = None
) -> Teacher:
    """The target's distribution at the labelled positions, from its last hidden states; `cut`: as of `Teacher`."""
    hidden_PH, _ = labelled(hidden_RSH, batch)
    return Teacher(hidden_PH, Projection.of(target), cut=cut)
