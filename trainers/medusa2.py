"""Train Medusa heads and the target beneath them together: Medusa-2.

Cai et al. 2024, arXiv 2401.10774, section 2.2.2: L = L_LM + lambda_0 L_Medusa-1, so that the target
keeps its ability while its states come to say more of what follows. The heads learn faster than
the target, and first: alone for a while (`tune.rest_steps`), or by a weight that grows from 0.
Section 2.3.2, self-distillation: L_LM is KL(p_original || p), p_original the same weights before
the run, with adapters off. Order of the file, as in every trainer: the module, the objective,
set-up. Read next: `tuned.py`, the target that moves; `medusa.py`, L_Medusa-1; `eval/measure/drift.py`.

Shapes: R rows, S tokens of a row, H hidden size.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from ..data.rows.prepare import Prepared
from ..drafters.heads.medusa import MedusaHeads
from ..drafters.projection import check_plain_logits
from .config import Medusa2Config, MedusaConfig, ModelConfig, ObjectiveConfig, TuneConfig
from .distill import check_terms
from .loop.loop import Outcome
from .loop.objective import Batch
from .losses.chunked import Teacher
from .medusa import MedusaObjective, MedusaStudent, TeacherOutput, check_no_prefix
from .student.warm_start import warm_started
from .teacher.frozen import Given, Save
from .teacher.tuned import TunedStudent, TunedTarget, run_tuned, tuned_saver


class Medusa2Student(TunedStudent):
    """Both losses, the heads' on the very states that the target's own loss moves."""

    def __init__(self, heads: MedusaStudent, tuned: TunedTarget, config: Medusa2Config, *, chunk: int) -> None:
        super().__init__(heads, tuned, distils=config.self_distillation, chunk=chunk)
        self._medusa2, self._grown = config, 1.0

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
        heads_loss, terms = self.student(batch, TeacherOutput(hidden_RSH))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_resting):
            own_loss, own = self.language_loss(hidden_RSH, batch, teacher)
        loss = heads_loss if self.is_resting else own_loss + self.weight * heads_loss
        return loss, {**terms, **own, "loss": loss.detach(), "heads_loss": heads_loss.detach()}


def sine(step: int, steps: int) -> float:
    """Growth from 0 to 1 along a quarter of a sine, done with the last of `steps`."""
    return math.sin(math.pi / 2 * min(1.0, max(0, step + 1) / steps)) if steps else 1.0


class Medusa2Objective(MedusaObjective):
    """Trains heads and target; the teacher output is what the original says, where that is asked for."""

    def __init__(
        self, student: Medusa2Student, heads: MedusaStudent, tuned: TunedTarget, save: Save, *, distils: bool
    ) -> None:
        super().__init__(heads, tuned.model, save)
        self.module = student
        self._student, self._tuned, self._distils = student, tuned, distils

    def begin_step(self, step: int, _seed: int) -> None:
        self._student.begin_step(step)

    def prepare(self, batch: Batch) -> Teacher | None:  # type: ignore[override]
        """The original's distribution at the labelled positions; None where the text itself is learnt."""
        return self._tuned.teacher(batch) if self._distils else None


def build(
    medusa: MedusaConfig, medusa2: Medusa2Config, objective: ObjectiveConfig, tuned: TunedTarget, save: Save
) -> Medusa2Objective:
    """Untrained heads for `tuned`, which learns with them.

    Raises:
        RequestError: the heads would learn nothing, have a layer in front of them that they cannot
            have, or the target's logits are more than a projection.
    """
    check_terms(objective, places=medusa.heads)
    check_plain_logits(tuned.model)
    check_no_prefix(medusa)
    heads = MedusaHeads.for_target(
        tuned.model, heads=medusa.heads, layers=medusa.layers, shared_head=medusa.shared_head
    )
    student = MedusaStudent(heads, tuned.head, medusa.decay, objective)
    joint = Medusa2Student(student, tuned, medusa2, chunk=objective.chunk)
    return Medusa2Objective(joint, student, tuned, save, distils=medusa2.self_distillation)


def run(
    *,
    medusa: MedusaConfig,
    medusa2: Medusa2Config,
    tune: TuneConfig,
    objective: ObjectiveConfig,
    model: ModelConfig,
    **given: Unpack[Given],
) -> Outcome:
    """Train heads into `out/drafter`, and the target that they fit into `out/target`.

    `model.start_from` may name finished heads of the target as it is before the run: Medusa-1's.
    """

    def make(tuned: TunedTarget, _rows: Prepared) -> Medusa2Objective:
        save = tuned_saver(tuned, "medusa", given["out"])
        return warm_started(build(medusa, medusa2, objective, tuned, save), model, tuned.backbone)

    return run_tuned(make, tune, given, remember=medusa2.self_distillation)
