"""Train Medusa heads on the last hidden states of a frozen target, run in the same process.

Medusa-1 (Cai et al. 2024, arXiv 2401.10774, section 2.2.1): sum_k lambda_k CE_k, lambda_k = 0.8^k,
which is `objective: {kl: 0, ce: 1}`; with `kl` a head learns the target's distribution instead of one token
of it. Order of the file, as in every trainer: what it requires and what is trained, the loss, the
teacher's side, how a run begins. Read next: `drafters/heads/medusa.py`, the heads; `heads.py`, their losses;
`hydra.py`.

Shapes: R rows, S tokens of a row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.rows.prepare import Prepared
from ..decoding.backbone.backbone import Backbone
from ..drafters.heads.medusa import MedusaHeads
from .heads import HeadsStudent, check_no_prefix, last_states_of
from .loop.objective import Batch, Objective
from .losses.terms import check_terms
from .own_drafts.places import check_own_drafts
from .pruning.sizes import check_not_pruned
from .recipe import Run, TrainingRecipe
from .spine import DrafterObjective, begun
from .student.drafted import Draw, Where
from .student.fused import drafted_ids
from .teacher.frozen import Save
from .teacher.output import TeacherOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where nothing would be learnt, or heads are asked for that Medusa does not have."""
    medusa = recipe.medusa
    check_terms(recipe.objective, positions=medusa.heads, counted_by="medusa.heads")
    check_no_prefix(medusa)
    check_not_pruned(recipe.model)
    check_own_drafts(recipe)


def student(recipe: TrainingRecipe, target: PreTrainedModel, ids: Sequence[int] | None = None) -> MedusaHeads:
    """Untrained heads for `target`; on the meta device their shapes alone. `ids`: as of `drafted_ids`."""
    medusa = recipe.medusa
    return MedusaHeads.for_target(
        target,
        heads=medusa.heads,
        layers=medusa.layers,
        shared_head=medusa.shared_head,
        ids=drafted_ids(medusa.vocabulary, target, ids),
    )


class MedusaStudent(HeadsStudent):
    """The loss of heads that read the target's last hidden states alone: sum_k decay^k loss_k."""

    def __init__(self, heads: MedusaHeads, target: PreTrainedModel, recipe: TrainingRecipe) -> None:
        super().__init__(heads, target, recipe.objective, recompute=recipe.medusa.recompute)
        self._decay = recipe.medusa.decay

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_RSH = teacher_output.hidden_RSH
        return self.decayed(batch, hidden_RSH, last_states_of(hidden_RSH), self._decay)

    def drafts_behind(self, _batch: Batch, given: TeacherOutput, places: Where, draw: Draw, _embed: Any) -> Any:
        """As of `DraftsBehind`: no head sees what another drafts."""
        hidden_XH = given.hidden_RSH[places.row_X, places.at_X].to(self.medusa.dtype)
        with torch.no_grad():
            for k in range(1, self.drafts_made + 1):
                draw(self.medusa.head(k, hidden_XH))
        return [hidden_XH] * self.drafts_made


class MedusaObjective(DrafterObjective):
    """Trains `heads` to predict what the frozen `target` will say."""

    def __init__(self, recipe: TrainingRecipe, heads: MedusaHeads, target: PreTrainedModel, save: Save) -> None:
        super().__init__(MedusaStudent(heads, target, recipe), heads, target, save)


def build(run: Run, target: Backbone, rows: Prepared) -> Objective:
    """What a run trains: fresh heads, or those that `model.start_from` names."""
    return begun(MedusaObjective, student, run, target, rows)
