"""Train Hydra heads: as Medusa's, on the true tokens in front of the one that each speaks of.

Ankner et al. 2024, arXiv 2402.05109. Hydra is `objective: {kl: 0, ce: 1}` with `medusa.decay` 1;
Hydra++ adds three things: `medusa.prefix`, a layer in front of the heads, `medusa.layers` 4, and
the teacher loss `objective: {kl: 1, ce: 0}`. Order of the file, as in every trainer: the module,
the objective, set-up. Read next: `drafters/heads/hydra.py`, the heads; `drafters/heads/hydra_prefix.py`, the
layer; `medusa.py`, labels and losses.

Shapes: R rows, S tokens of a row, H hidden size, F numbers that a head reads, X positions that
have a token so far ahead.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from ..data.rows.prepare import Prepared
from ..decoding.target.backbone import Backbone
from ..drafters.heads.hydra import Hydra, HydraHeads, HydraPlus, reads
from .config import MedusaConfig, ModelConfig, ObjectiveConfig
from .loop.loop import Outcome
from .loop.objective import Batch
from .medusa import MedusaObjective, MedusaStudent, TeacherOutput, student
from .student.warm_start import warm_started
from .teacher.frozen import Given, Save, run_for_target, saver

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HydraStudent(MedusaStudent):
    """Medusa's losses; head k reads tokens t+1 to t+k too, and the layer's output if there is one.

    The layer runs once per batch, over whole rows, inside each document.
    """

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        heads: Any = self.medusa
        if heads.prefix is not None:
            hidden_RSH = teacher_output.hidden_RSH.to(heads.dtype)
            read_RSH = heads.prefix(hidden_RSH, batch["positions"], documents_BN=batch["documents"])
            teacher_output = teacher_output._replace(read_RSH=read_RSH)
        return super().forward(batch, teacher_output)

    def given(self, k: int, teacher_output: TeacherOutput) -> Tensor:
        """h_t and the embeddings of the k tokens behind t, [R, X, F]."""
        assert teacher_output.embeds_RSH is not None  # `HydraObjective.prepare` makes them
        read_RSH = teacher_output.hidden_RSH if teacher_output.read_RSH is None else teacher_output.read_RSH
        X = teacher_output.embeds_RSH.shape[1] - (k + 1)
        if X <= 0:  # rows too short for this head
            return reads(read_RSH[:, :0], [teacher_output.embeds_RSH[:, :0]] * k)
        embeds = [teacher_output.embeds_RSH[:, ahead : ahead + X] for ahead in range(1, k + 1)]
        return reads(read_RSH[:, :X], embeds)


class HydraObjective(MedusaObjective):
    """Medusa's objective; the target's embeddings are part of the teacher output."""

    @torch.no_grad()
    def prepare(self, batch: Batch) -> TeacherOutput:
        """The target's last hidden states and its embeddings of the tokens."""
        teacher_output = super().prepare(batch)
        embed: Any = self._target.get_input_embeddings()
        return TeacherOutput(teacher_output.hidden_RSH, embed(batch["input_ids"]))


def build(medusa: MedusaConfig, objective: ObjectiveConfig, target: PreTrainedModel, save: Save) -> HydraObjective:
    """Untrained heads for `target`, which is frozen here; errors as for `medusa.student`."""
    fresh = partial(HydraHeads.for_target, prefix=medusa.prefix)
    return HydraObjective(student(fresh, HydraStudent, medusa, objective, target), target, save)


def run(*, medusa: MedusaConfig, objective: ObjectiveConfig, model: ModelConfig, **given: Unpack[Given]) -> Outcome:
    """Train heads into `out/drafter`, fresh ones or those that `model.start_from` names."""
    kind = HydraPlus if medusa.prefix else Hydra

    def make(target: Backbone, _rows: Prepared) -> HydraObjective:
        goal = build(medusa, objective, target.model, saver(target, kind.family))
        return warm_started(goal, model, target)

    return run_for_target(make, given)
