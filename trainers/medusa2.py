"""Train Medusa heads and the target beneath them together: Medusa-2.

Cai et al. 2024, arXiv 2401.10774, section 2.2.2: L = L_LM + lambda_0 L_Medusa-1, so that the target
keeps its ability while its states come to say more of what follows. The heads learn faster than
the target, and first: alone for a while (`tune.rest_steps`), or by a weight that grows from 0.
Section 2.3.2, self-distillation: L_LM is KL(p_original || p), p_original the same weights before
the run, with adapters off. Order of the file, as in every trainer: what it requires and what is
trained, the loss, the teacher's side, how a run begins. Read next: `teacher/tuned.py`, the target that moves;
`heads.py`, L_Medusa-1; `eval/measure/drift.py`.

Shapes: R rows, S tokens of a row, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..data.rows.prepare import Prepared
from ..drafters.heads.medusa import MedusaHeads
from .heads import HeadsStudent, check_no_prefix, last_states_of
from .loop.objective import Batch, Objective
from .loop.sharding import standalone
from .losses.chunked import Teacher
from .losses.terms import check_terms
from .pruning.sizes import check_not_pruned
from .recipe import Run, TrainingRecipe
from .spine import most_frequent
from .student.fused import drafted_ids
from .student.warm_start import warm_started
from .teacher.frozen import Save
from .teacher.tuned import TunedStudent, TunedTarget, check_tuned, tuned_saver

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where nothing would be learnt, heads are asked for that Medusa does not
    have, or the target cannot move as the recipe says."""
    medusa = recipe.medusa
    check_terms(recipe.objective, positions=medusa.heads, counted_by="medusa.heads")
    check_no_prefix(medusa)
    check_not_pruned(recipe.model)
    check_tuned(recipe)


def student(recipe: TrainingRecipe, target: PreTrainedModel, ids: Sequence[int] | None = None) -> MedusaHeads:
    """Untrained heads for `target`; on the meta device their shapes alone. What moves of the target
    is not among them: see `teacher/tuned.py`. `ids`: as of `drafted_ids`."""
    medusa = recipe.medusa
    return MedusaHeads.for_target(
        target,
        heads=medusa.heads,
        layers=medusa.layers,
        shared_head=medusa.shared_head,
        ids=drafted_ids(medusa.vocabulary, target, ids),
    )


class Medusa2Student(TunedStudent):
    """Both losses, the heads' on the very states that the target's own loss moves."""

    student: HeadsStudent

    def __init__(self, heads: MedusaHeads, tuned: TunedTarget, recipe: TrainingRecipe) -> None:
        medusa2 = recipe.medusa2
        recompute = recipe.medusa.recompute
        heads_student = HeadsStudent(heads, tuned.model, recipe.objective, recompute=recompute)
        super().__init__(heads_student, tuned, distils=medusa2.self_distillation, chunk=recipe.objective.chunk)
        self._medusa2, self._decay = medusa2, recipe.medusa.decay
        self._grown = 1.0

    def begin_step(self, step: int) -> None:
        """Whether the target rests, and how far the heads' weight has grown."""
        super().begin_step(step)
        self._grown = sine(step - self.tune.rest_steps, self._medusa2.sine_steps)

    @property
    def weight(self) -> float:
        """lambda_0 of this step; what is measured, as on held-out rows, has the full one."""
        return self._medusa2.weight * (self._grown if self.training else 1.0)

    def forward(self, batch: Batch, teacher: Teacher | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The heads' loss alone while the target rests, both behind it."""
        hidden_RSH = self.states(batch)
        heads_loss, terms = self.student.decayed(batch, hidden_RSH, last_states_of(hidden_RSH), self._decay)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_resting):
            own_loss, own = self.language_loss(hidden_RSH, batch, teacher)
        loss = heads_loss if self.is_resting else own_loss + self.weight * heads_loss
        return loss, {**terms, **own, "loss": loss.detach(), "heads_loss": heads_loss.detach()}


def sine(step: int, steps: int) -> float:
    """Growth from 0 to 1 along a quarter of a sine, done with the last of `steps`."""
    return math.sin(math.pi / 2 * min(1.0, max(0, step + 1) / steps)) if steps else 1.0


class Medusa2Objective(Objective):
    """Trains `heads` and the target beneath them."""

    def __init__(self, recipe: TrainingRecipe, heads: MedusaHeads, tuned: TunedTarget, save: Save) -> None:
        self._student = Medusa2Student(heads, tuned, recipe)
        super().__init__(self._student)
        self._heads, self._tuned, self._save = heads, tuned, save
        self._distils = remembers(recipe)

    def begin_step(self, step: int, _seed: int) -> None:
        self._student.begin_step(step)

    def prepare(self, batch: Batch) -> Teacher | None:
        """The original's distribution at the labelled positions; None where the text itself is learnt."""
        return self._tuned.teacher(batch) if self._distils else None

    def export(self, folder: Path) -> None:
        """Write a drafter folder; `tuned_saver` writes the target before it."""
        self._save(standalone(self._heads), folder)

    def draft(self) -> nn.Module:
        return self._heads


def build_tuned(run: Run, tuned: TunedTarget, rows: Prepared) -> Medusa2Objective:
    """What a run trains: fresh heads, or those that `model.start_from` names: finished ones of the target as it is
    before the run, Medusa-1's."""
    ids = most_frequent(run.recipe, tuned.backbone, rows)
    heads = warm_started(student(run.recipe, tuned.model, ids), run.recipe, tuned.backbone)
    return Medusa2Objective(run.recipe, heads, tuned, tuned_saver(tuned, "medusa", run.out))


def remembers(recipe: TrainingRecipe) -> bool:
    """Whether the target is held to the distribution that it had before the run."""
    return recipe.medusa2.self_distillation
