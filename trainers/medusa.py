"""Train Medusa heads on the last hidden states of a frozen target, run in the same process.

Medusa-1 (Cai et al. 2024, arXiv 2401.10774, section 2.2.1): sum_k lambda_k CE_k, lambda_k = 0.8^k,
which is `objective: {kl: 0, ce: 1}`; with `kl` a head learns the target's distribution instead of one token
of it. Order of the file, as in every trainer: what it requires and what is trained, the loss, the
teacher's side, the run. Read next: `drafters/heads/medusa.py`, the heads; `heads.py`, their losses;
`hydra.py`.

Shapes: R rows, S tokens of a row, H hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..data.rows.prepare import Prepared
from ..decoding.backbone.backbone import Backbone
from ..drafters.heads.medusa import MedusaHeads
from .heads import HeadsStudent, check_no_prefix, last_states_of
from .loop.loop import Outcome
from .loop.objective import Batch
from .loop.sharding import standalone
from .losses.terms import check_terms
from .pruning.sizes import check_not_pruned
from .sections import MakeProbe, Run, Sections
from .student.warm_start import warm_started
from .teacher.features import FeatureSource, OnlineFeatures
from .teacher.frozen import Save, check_teacher, freeze, run_for_target, saver
from .teacher.output import TeacherOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: Sections) -> None:
    """Raise RequestError where nothing would be learnt, or heads are asked for that Medusa does not have."""
    medusa = recipe.medusa
    check_terms(recipe.objective, positions=medusa.heads, counted_by="medusa.heads")
    check_no_prefix(medusa)
    check_not_pruned(recipe.model)


def check_target(recipe: Sections, target: PreTrainedModel) -> None:
    """Raise RequestError for logits that training cannot make, or rows beyond the context."""
    check_teacher(recipe, target)


def student(recipe: Sections, target: PreTrainedModel) -> MedusaHeads:
    """Untrained heads for `target`; on the meta device their shapes alone."""
    medusa = recipe.medusa
    return MedusaHeads.for_target(target, heads=medusa.heads, layers=medusa.layers, shared_head=medusa.shared_head)


class MedusaStudent(HeadsStudent):
    """The loss of heads that read the target's last hidden states alone: sum_k decay^k loss_k."""

    def __init__(self, heads: MedusaHeads, target: PreTrainedModel, recipe: Sections) -> None:
        super().__init__(heads, target, recipe.objective, recompute=recipe.medusa.recompute)
        self._decay = recipe.medusa.decay

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_RSH = teacher_output.hidden_RSH
        return self.decayed(batch, hidden_RSH, last_states_of(hidden_RSH), self._decay)


class MedusaObjective:
    """Trains `heads` to predict what the frozen `target` will say."""

    def __init__(self, recipe: Sections, heads: MedusaHeads, target: PreTrainedModel, save: Save) -> None:
        self.module: nn.Module = MedusaStudent(heads, freeze(target), recipe)
        self.features: FeatureSource = OnlineFeatures(target)
        self._heads, self._save = heads, save

    @torch.no_grad()
    def prepare(self, batch: Batch) -> TeacherOutput:
        """The target's last hidden states."""
        (hidden_RSH,) = self.features(batch)
        return TeacherOutput(hidden_RSH)

    def export(self, folder: Path) -> None:
        """Write a drafter folder."""
        self._save(standalone(self._heads), folder)

    def draft(self) -> nn.Module:
        return self._heads


def run(recipe: Sections, out: Path, resume: str = "auto", make_probe: MakeProbe | None = None) -> Outcome:
    """Train heads into `out/drafter`, fresh ones or those that `model.start_from` names."""
    check_recipe(recipe)

    def build(target: Backbone, _rows: Prepared) -> MedusaObjective:
        objective = MedusaObjective(recipe, student(recipe, target.model), target.model, saver(target, "medusa"))
        return warm_started(objective, recipe, target)

    return run_for_target(build, Run(recipe, out, resume, make_probe), check_target=check_target)
