"""Train the k-output layer of blockwise parallel decoding on a target's last hidden states.

Stern et al. 2018, arXiv 1811.03115, section 6: to bound memory one output, drawn anew at every
step, is trained instead of the mean over all of them, of which its loss is an unbiased estimate.
The target stays frozen, or is tuned with the layer: then its own output is one of the k, which
keeps it a language model. With `data` that the target has written both are the paper's distilled
regime, with the text's own answers its gold one; `objective.kl` teaches distributions in place of tokens.
Order of the file, as in every trainer: the module, the objective, set-up. Read next:
`drafters/heads/bpd.py`, the layer; `medusa.py`, labels and losses of heads; `tuned.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from ..data.rows.prepare import Prepared
from ..decoding.target.backbone import Backbone
from ..drafters.heads.bpd import BpdHeads
from ..drafters.projection import check_plain_logits
from .config import BpdConfig, ModelConfig, ObjectiveConfig, TuneConfig
from .distill import check_terms
from .loop.loop import Outcome
from .loop.objective import Batch
from .losses.chunked import Teacher
from .medusa import HeadLoss, MedusaObjective, MedusaStudent, TeacherOutput
from .student.warm_start import warm_started
from .teacher.frozen import Given, Save, run_for_target, saver
from .teacher.tuned import TunedStudent, TunedTarget, run_tuned, tuned_saver

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BpdStudent(MedusaStudent):
    """The mean of the heads' losses, or in training the loss of one of them in its place.

    Heads are counted as Medusa's: head k is output k + 1, and head 0 the target's own.
    """

    def __init__(self, heads: BpdHeads, target_head: nn.Linear, objective: ObjectiveConfig) -> None:
        super().__init__(heads, target_head, 1.0, objective)
        self._drawn: int | None = None

    @property
    def drawn(self) -> int | None:
        """The head that this step trains; None trains or measures all of them."""
        return self._drawn if self.training else None

    def draw(self, seed: int, *, first: int = 1) -> None:
        """Choose it, every head from `first` on being as likely as the others."""
        g = torch.Generator().manual_seed(seed)
        self._drawn = int(torch.randint(first, self.medusa.config.block, (), generator=g))

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        if self.drawn is not None:
            loss, terms = self.head(self.drawn, batch, teacher_output)
            return loss, {**terms, "loss": loss.detach()}
        loss = torch.zeros((), device=teacher_output.hidden_RSH.device)
        terms = {}
        for k in range(1, self.medusa.config.block):
            head_loss, found = self.head(k, batch, teacher_output)
            loss = loss + head_loss / self.medusa.config.heads
            terms |= {f"head{k}_{name}": value for name, value in found.items()}
        return loss, {"loss": loss.detach(), **terms}


class TunedBpdStudent(TunedStudent):
    """The same with the target beneath: its own loss is one of the k."""

    student: BpdStudent

    def forward(self, batch: Batch, teacher: Teacher | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Where the target rests, the mean is over the heads that learn."""
        hidden_RSH, drawn = self.states(batch), self.student.drawn
        if drawn == 0:
            loss, _ = self.language_loss(hidden_RSH, batch, teacher)
            # what wraps the module in several processes waits for a gradient of every parameter
            idle = torch.stack([p.sum() for p in self.student.parameters()]).sum()
            return loss + 0.0 * idle, {"loss": loss.detach()}
        loss, terms = self.student(batch, TeacherOutput(hidden_RSH))
        if drawn is not None or self.is_resting:
            return loss, {"loss": loss.detach()}
        own_loss, own = self.language_loss(hidden_RSH, batch, teacher)
        block = self.student.medusa.config.block
        loss = ((block - 1) * loss + own_loss) / block
        return loss, {**terms, **own, "loss": loss.detach()}


class BpdObjective(MedusaObjective):
    """Medusa's objective; every step begins with the choice of a head."""

    def __init__(self, student: BpdStudent, target: PreTrainedModel, save: Save, *, every_head: bool) -> None:
        super().__init__(student, target, save)
        self._student, self._every_head = student, every_head

    def begin_step(self, _step: int, seed: int) -> None:
        """One head for all of the step's batches on all processes, so that they add up."""
        if not self._every_head:
            self._student.draw(seed)


class TunedBpdObjective(BpdObjective):
    """Trains layer and target; the teacher output is what the target said before the run, if asked for."""

    def __init__(
        self, joint: TunedBpdStudent, tuned: TunedTarget, save: Save, *, every_head: bool, distils: bool
    ) -> None:
        super().__init__(joint.student, tuned.model, save, every_head=every_head)
        self.module = joint
        self._joint, self._tuned, self._distils = joint, tuned, distils

    def begin_step(self, step: int, seed: int) -> None:
        """The target's own output is drawn like any other, unless the target rests."""
        self._joint.begin_step(step)
        if not self._every_head:
            self._student.draw(seed, first=int(self._joint.is_resting))

    def prepare(self, batch: Batch) -> Teacher | None:  # type: ignore[override]
        """For the target's own output alone: others foresee the distribution that it has by now."""
        needed = self._distils and not self._student.drawn and not self._joint.is_resting
        return self._tuned.teacher(batch) if needed else None


def build(bpd: BpdConfig, objective: ObjectiveConfig, target: PreTrainedModel, save: Save) -> BpdObjective:
    """An untrained layer for `target`, which is frozen here.

    Raises:
        RequestError: nothing would be learnt, or the target's logits are more than a projection.
    """
    target.requires_grad_(False).eval()
    student = fresh_student(bpd, objective, target)
    return BpdObjective(student, target, save, every_head=bpd.every_head)


def build_tuned(bpd: BpdConfig, objective: ObjectiveConfig, tuned: TunedTarget, save: Save) -> TunedBpdObjective:
    """An untrained layer for `tuned`, which learns with it; errors as for `build`."""
    student = fresh_student(bpd, objective, tuned.model)
    distils = HeadLoss(objective).distils
    joint = TunedBpdStudent(student, tuned, distils=distils, chunk=objective.chunk)
    return TunedBpdObjective(joint, tuned, save, every_head=bpd.every_head, distils=distils)


def fresh_student(bpd: BpdConfig, objective: ObjectiveConfig, target: PreTrainedModel) -> BpdStudent:
    """An untrained layer and its loss; errors as for `build`."""
    check_terms(objective)
    check_plain_logits(target)
    head: Any = target.get_output_embeddings()
    return BpdStudent(BpdHeads.for_target(target, block=bpd.block, inner=bpd.inner), head, objective)


def run(
    *, bpd: BpdConfig, tune: TuneConfig, objective: ObjectiveConfig, model: ModelConfig, **given: Unpack[Given]
) -> Outcome:
    """Train a layer into `out/drafter`; a tuned target, which alone it fits, into `out/target`.

    The layer is fresh, or the one that `model.start_from` names.
    """

    def make(target: Backbone, _rows: Prepared) -> BpdObjective:
        goal = build(bpd, objective, target.model, saver(target, "bpd"))
        return warm_started(goal, model, target)

    def make_tuned(tuned: TunedTarget, _rows: Prepared) -> TunedBpdObjective:
        save = tuned_saver(tuned, "bpd", given["out"])
        return warm_started(build_tuned(bpd, objective, tuned, save), model, tuned.backbone)

    if bpd.backbone == "frozen":
        return run_for_target(make, given)
    return run_tuned(make_tuned, tune, given, remember=HeadLoss(objective).distils)
