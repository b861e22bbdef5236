"""Train Medusa heads on the last hidden states of a frozen target, run in the same process.

Medusa-1 (Cai et al. 2024, arXiv 2401.10774, section 2.2.1): sum_k lambda_k CE_k, lambda_k = 0.8^k,
which is `objective: {kl: 0, ce: 1}`; with `kl` a head learns the target's law instead of one token
of it. Order of the file, as in every trainer: the module, the objective, set-up.
Read next: `drafters/medusa.py`, the heads; `losses.py`; `hydra.py`.

Shapes: R rows, S tokens of a row, P positions that count, C positions of a chunk, V vocabulary,
H hidden size, F numbers that a head reads, X positions that have a token so far ahead.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from ..drafters.medusa import MedusaHeads
from .config import MedusaConfig, ObjectiveConfig
from .distill import refuse_nothing
from .frozen import Given, Save, run_for_target, saver
from .loop import Outcome
from .losses import ChunkedLoss, Distillation, Teacher, cross_entropy
from .objective import Batch, hidden_states
from .sharding import standalone

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def counted(batch: Batch, k: int) -> Tensor:
    """Positions t at which head k has a label: token t+k+1 counts and is of t's own document.

    bool [R, S-1-k]; in a row no longer than that there is none.
    """
    documents_RS = batch["documents"]
    same_RX = documents_RS[:, k + 1 :] == documents_RS[:, : -(k + 1)]
    return batch["loss_mask"][:, k + 1 :] & same_RX


class HeadLoss:
    """The loss of one head: `kl` * KL(p || q) + `ce` * cross-entropy, for `ChunkedLoss`.

    p is the target's law of the very token that the head speaks of. Also reported: `top1`, how
    often the head's likeliest token is the text's own, and with `kl` the laws' overlap `alpha`.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.distils = config.kl > 0
        self.names = ("loss", "top1", "alpha") if self.distils else ("loss", "top1")
        self._ce = config.ce
        self._distillation = Distillation(config.kl, config.ce, config.temperature)

    def __call__(
        self, draft_CV: Tensor, target_CV: Tensor | None, label_C: Tensor
    ) -> dict[str, Tensor]:
        top1_C = (draft_CV.argmax(-1) == label_C).float()
        if not self.distils:
            ce_C = cross_entropy(draft_CV, None, label_C)["loss"]
            return {"loss": self._ce * ce_C, "top1": top1_C}
        terms = self._distillation(draft_CV, target_CV, label_C)
        return {"loss": terms["loss"], "top1": top1_C, "alpha": terms["alpha"]}


class Lesson(NamedTuple):
    """What the target says about a batch, [R, S, H] each."""

    hidden_RSH: Tensor
    """What its output projection reads."""
    embeds_RSH: Tensor | None = None
    """Embeddings of the tokens, for heads that see some."""


class MedusaStudent(nn.Module):
    """The heads and their losses, each in chunks over the positions where it has a label."""

    def __init__(
        self, heads: MedusaHeads, target_head: nn.Linear, decay: float, objective: ObjectiveConfig
    ) -> None:
        super().__init__()
        self.medusa, self._decay = heads, decay
        self._loss = HeadLoss(objective)
        own: Any = heads.lm_heads
        self.losses = nn.ModuleList(
            ChunkedLoss(lm_head, self._loss, chunk=objective.chunk) for lm_head in own
        )
        # in a tuple it is no part of this module: the projection is the target's, and what wraps,
        # shards or saves this module must not touch it
        self._frozen = (ChunkedLoss(target_head, self._loss, chunk=objective.chunk),)

    def forward(self, batch: Batch, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]:
        loss = torch.zeros((), device=lesson.hidden_RSH.device)
        terms: dict[str, Tensor] = {}
        for k in range(1, self.medusa.config.heads + 1):
            head_loss, found = self.head(k, batch, lesson)
            loss = loss + self._decay**k * head_loss
            terms |= {f"head{k}_{name}": value for name, value in found.items()}
        return loss, {"loss": loss.detach(), **terms}

    def head(self, k: int, batch: Batch, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of head k summed over its labels, and its terms."""
        counts_RX = counted(batch, k)
        label_P = batch["input_ids"][:, k + 1 :][counts_RX]
        given_PF = self.given(k, lesson)[counts_RX].to(self.medusa.dtype)
        chunked = self._frozen[0] if self.medusa.config.shared_head else self.losses[k - 1]
        teacher = None
        if self._loss.distils:
            teacher = self._teacher(lesson.hidden_RSH[:, k:-1][counts_RX])
        loss, sums = chunked(self.medusa.blocks[k - 1](given_PF), label_P, teacher)
        # the loop divides by all labels, of which a head lacks the first k of every document; and
        # it adds up the same names on every process, whatever the batch held there
        share = batch["loss_mask"].sum() / max(1, len(label_P))
        zero = loss.detach() * 0
        return loss, {name: sums.get(name, zero) * share for name in self._loss.names}

    def given(self, k: int, lesson: Lesson) -> Tensor:
        """What head k reads at every position that has a token k + 1 places ahead, [R, X, F]."""
        return lesson.hidden_RSH[:, : -(k + 1)]

    def _teacher(self, hidden_PH: Tensor) -> Teacher:
        weight_VH = self._frozen[0].weight
        return Teacher(hidden_PH.to(weight_VH.dtype), weight_VH)


class MedusaObjective:
    """Trains the heads of `student` to foresee what the frozen `target` will say."""

    def __init__(self, student: MedusaStudent, target: PreTrainedModel, save: Save) -> None:
        self.module: nn.Module = student
        self._heads, self._target, self._save = student.medusa, target, save

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Lesson:
        """The target's last hidden states."""
        target: Any = self._target
        device = batch["input_ids"].device
        if target.device != device:
            target.to(device)
        return Lesson(hidden_states(target, batch))

    def export(self, folder: Path) -> None:
        """A drafter checkpoint, as `drafters/` writes and reads it."""
        self._save(standalone(self._heads), folder)

    def draft(self) -> nn.Module:
        return self._heads


def build(
    medusa: MedusaConfig, objective: ObjectiveConfig, target: PreTrainedModel, save: Save
) -> MedusaObjective:
    """Untrained heads for `target`, which is frozen here; errors as for `student`."""
    return MedusaObjective(
        student(MedusaHeads, MedusaStudent, medusa, objective, target), target, save
    )


def student(
    heads: type[MedusaHeads], kind: type[MedusaStudent], medusa: MedusaConfig,
    objective: ObjectiveConfig, target: PreTrainedModel,
) -> MedusaStudent:  # fmt: skip
    """Untrained heads of a family and their loss; freezes the target.

    Raises:
        RequestError: nothing would be learnt, or the target's output projection has a bias.
    """
    refuse_nothing(objective)
    target.requires_grad_(False).eval()
    fresh = heads.for_target(
        target, heads=medusa.heads, layers=medusa.layers, shared_head=medusa.shared_head
    )
    head: Any = target.get_output_embeddings()
    return kind(fresh, head, medusa.decay, objective)


def run(*, medusa: MedusaConfig, objective: ObjectiveConfig, **given: Unpack[Given]) -> Outcome:
    """Train heads into `out/drafter`."""
    return run_for_target(
        lambda target, _rows: build(medusa, objective, target.model, saver(target, "medusa")), given
    )
