"""Train the k-output layer of blockwise parallel decoding on a target's last hidden states.

Stern et al. 2018, arXiv 1811.03115, section 6: to bound memory one output, drawn anew at every
step, is trained instead of the mean over all of them, of which its loss is an unbiased estimate.
The target stays frozen, or is tuned with the layer: then its own output is one of the k, which
keeps it a language model. With `data` that the target has written both are the paper's distilled
regime, with the text's own answers its gold one; `objective.kl` teaches distributions in place of tokens.
Order of the file, as in every trainer: what it requires and what is trained, the loss, the
teacher's side, how a run begins. Read next: `drafters/heads/bpd.py`, the layer; `heads.py`, labels and losses
of heads; `teacher/tuned.py`.

Shapes: R rows, S tokens of a row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..data.rows.prepare import Prepared
from ..decoding.backbone.backbone import Backbone
from ..drafters.heads.bpd import BpdHeads
from .heads import HeadLoss, HeadsStudent, last_states_of
from .loop.objective import Batch, Objective
from .loop.sharding import standalone
from .losses.chunked import Teacher
from .losses.terms import check_terms
from .pruning.sizes import check_not_pruned
from .recipe import Run, TrainingRecipe
from .spine import DrafterObjective, begun, most_frequent
from .student.fused import drafted_ids
from .student.warm_start import warm_started
from .teacher.frozen import Save
from .teacher.output import TeacherOutput
from .teacher.tuned import TunedStudent, TunedTarget, check_tuned, tuned_saver

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where nothing would be learnt, or a tuned target cannot move as the recipe says."""
    check_terms(recipe.objective)
    check_not_pruned(recipe.model)
    if recipe.tunes_target:
        check_tuned(recipe)


def student(recipe: TrainingRecipe, target: PreTrainedModel, ids: Sequence[int] | None = None) -> BpdHeads:
    """An untrained layer for `target`; on the meta device its shapes alone. What moves of a tuned
    target is not part of it: see `teacher/tuned.py`. `ids`: as of `drafted_ids`."""
    bpd = recipe.bpd
    ids = drafted_ids(bpd.vocabulary, target, ids)
    return BpdHeads.for_target(target, block=bpd.block, inner=bpd.inner, ids=ids)


class BpdStudent(HeadsStudent):
    """The mean of the heads' losses, or in training the loss of one of them in its place.

    Heads are counted as Medusa's: head k is output k + 1, and head 0 the target's own.
    """

    def __init__(self, heads: BpdHeads, target: PreTrainedModel, recipe: TrainingRecipe) -> None:
        super().__init__(heads, target, recipe.objective)
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
        hidden_RSH = teacher_output.hidden_RSH
        reads = last_states_of(hidden_RSH)
        if self.drawn is not None:
            loss, terms = self.head(self.drawn, batch, hidden_RSH, reads)
            return loss, {**terms, "loss": loss.detach()}
        loss = torch.zeros((), device=hidden_RSH.device)
        terms = {}
        for k in range(1, self.medusa.config.block):
            head_loss, head_terms = self.head(k, batch, hidden_RSH, reads)
            loss = loss + head_loss / self.medusa.config.heads
            terms |= head_terms
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


class BpdObjective(DrafterObjective):
    """Trains `layer` for a frozen target; every step begins with the choice of a head."""

    def __init__(self, recipe: TrainingRecipe, layer: BpdHeads, target: PreTrainedModel, save: Save) -> None:
        self._student = BpdStudent(layer, target, recipe)
        super().__init__(self._student, layer, target, save)
        self._every_head = recipe.bpd.every_head

    def begin_step(self, _step: int, seed: int) -> None:
        """One head for all of the step's batches on all processes, so that they add up."""
        if not self._every_head:
            self._student.draw(seed)


class TunedBpdObjective(Objective):
    """Trains `layer` and the target beneath it."""

    def __init__(self, recipe: TrainingRecipe, layer: BpdHeads, tuned: TunedTarget, save: Save) -> None:
        self._distils = remembers(recipe)
        self._student = BpdStudent(layer, tuned.model, recipe)
        self._joint = TunedBpdStudent(self._student, tuned, distils=self._distils, chunk=recipe.objective.chunk)
        super().__init__(self._joint)
        self._layer, self._tuned, self._save = layer, tuned, save
        self._every_head = recipe.bpd.every_head

    def begin_step(self, step: int, seed: int) -> None:
        """The target's own output is drawn like any other, unless the target rests."""
        self._joint.begin_step(step)
        if not self._every_head:
            self._student.draw(seed, first=int(self._joint.is_resting))

    def prepare(self, batch: Batch) -> Teacher | None:
        """The original's distribution, for the target's own output alone: the heads learn the
        distribution that the target has by now."""
        needed = self._distils and not self._student.drawn and not self._joint.is_resting
        return self._tuned.teacher(batch) if needed else None

    def export(self, folder: Path) -> None:
        """Write a drafter folder; `tuned_saver` writes the target before it."""
        self._save(standalone(self._layer), folder)

    def draft(self) -> nn.Module:
        return self._layer


def build(run: Run, target: Backbone, rows: Prepared) -> Objective:
    """What a run for a frozen target trains: a fresh layer, or the one that `model.start_from` names."""
    return begun(BpdObjective, student, run, target, rows)


def build_tuned(run: Run, tuned: TunedTarget, rows: Prepared) -> TunedBpdObjective:
    """The same for a target that is tuned."""
    ids = most_frequent(run.recipe, tuned.backbone, rows)
    layer = warm_started(student(run.recipe, tuned.model, ids), run.recipe, tuned.backbone)
    return TunedBpdObjective(run.recipe, layer, tuned, tuned_saver(tuned, "bpd", run.out))


def remembers(recipe: TrainingRecipe) -> bool:
    """Whether a tuned target's own output is held to the distribution that it had before the run."""
    return HeadLoss(recipe.objective).distils
