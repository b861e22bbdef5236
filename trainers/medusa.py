"""Train Medusa heads on the last hidden states of a frozen target, run in the same process.

Medusa-1 (Cai et al. 2024, arXiv 2401.10774, section 2.2.1): sum_k lambda_k CE_k, lambda_k = 0.8^k,
which is `objective: {kl: 0, ce: 1}`; with `kl` a head learns the target's distribution instead of one token
of it. Order of the file, as in every trainer: the module, the objective, set-up.
Read next: `drafters/heads/medusa.py`, the heads; `losses/chunked.py`; `hydra.py`.

Shapes: R rows, S tokens of a row, P positions that count, C positions of a chunk, V vocabulary,
H hidden size, F numbers that a head reads, X positions that have a token so far ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from ..data.rows.prepare import Prepared
from ..decoding.target.backbone import Backbone
from ..drafters.heads.medusa import Heads, MedusaHeads
from ..drafters.projection import check_plain_logits
from ..errors import RequestError
from .config import MedusaConfig, ModelConfig, ObjectiveConfig
from .distill import check_terms
from .loop.loop import Outcome
from .loop.objective import Batch
from .loop.sharding import standalone
from .losses.chunked import ChunkedLoss, Teacher, cross_entropy
from .losses.mix import Mix
from .losses.pace import anchors_of, paced
from .student.warm_start import warm_started
from .teacher.features import FeatureSource, OnlineFeatures
from .teacher.frozen import Given, Save, run_for_target, saver

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
    """The loss of one head: the recipe's mix of terms, for `ChunkedLoss`.

    p is the target's distribution of the very token that the head speaks of. Also reported: `top1`, how
    often the head's likeliest token is the text's own, and the distributions' overlap `alpha` where a term
    asks for the target's.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self._mix = Mix.of(config)
        self.distils = self._mix.asks_the_target
        self.names: tuple[str, ...] = ("loss", "top1")
        if self.distils:
            self.names += ("alpha",) if config.teacher_top_k is None else ("alpha", "cut_mass")

    def __call__(self, draft_CV: Tensor, target_CV: Tensor | None, label_C: Tensor) -> dict[str, Tensor]:
        top1_C = (draft_CV.argmax(-1) == label_C).float()
        if not self.distils:
            ce_C = cross_entropy(draft_CV, None, label_C)["loss"]
            return {"loss": self._mix.ce * ce_C, "top1": top1_C}
        terms = self._mix(draft_CV, target_CV, label_C)
        reported = {name: terms[name] for name in self.names if name in terms}
        return {"loss": terms["loss"], "top1": top1_C, **reported}


class TeacherOutput(NamedTuple):
    """What the target says about a batch, [R, S, H] each."""

    hidden_RSH: Tensor
    """What its output projection reads."""
    embeds_RSH: Tensor | None = None
    """Embeddings of the tokens, for heads that see some."""
    read_RSH: Tensor | None = None
    """What the heads read in the place of `hidden_RSH`, where something stands in front of them."""


class MedusaStudent(nn.Module):
    """The heads and their losses, each in chunks over the positions where it has a label."""

    def __init__(self, heads: Heads, target_head: nn.Linear, decay: float, objective: ObjectiveConfig) -> None:
        super().__init__()
        self.medusa, self._decay = heads, decay
        self._loss = HeadLoss(objective)
        self._pace_floor = objective.pace_floor if objective.positions == "d-pace" else None
        own: Any = heads.lm_heads
        self.losses = nn.ModuleList(ChunkedLoss(lm_head, self._loss, chunk=objective.chunk) for lm_head in own)
        # in a tuple it is no part of this module: the projection is the target's, and what wraps,
        # shards or saves this module must not touch it
        self._frozen = (ChunkedLoss(target_head, self._loss, chunk=objective.chunk),)

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss = torch.zeros((), device=teacher_output.hidden_RSH.device)
        terms: dict[str, Tensor] = {}
        heads = range(1, self.medusa.config.heads + 1)
        paces = None if self._pace_floor is None else self._paces(batch, teacher_output, self._pace_floor)
        for k in heads:
            head_loss, found = self.head(k, batch, teacher_output, None if paces is None else paces[k - 1])
            loss = loss + (self._decay**k * head_loss if paces is None else head_loss)
            terms |= {f"head{k}_{name}": value for name, value in found.items()}
        return loss, {"loss": loss.detach(), **terms}

    def head(
        self, k: int, batch: Batch, teacher_output: TeacherOutput, share_P: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of head k summed over its labels, each counting `share_P` if given; and its terms,
        where all labels count alike."""
        counts_RX = counted(batch, k)
        label_P = batch["input_ids"][:, k + 1 :][counts_RX]
        teacher = None
        if self._loss.distils:
            teacher = self._teacher(teacher_output.hidden_RSH[:, k:-1][counts_RX])
        hidden_PH = self._hidden(k, counts_RX, teacher_output)
        loss, sums = self._chunked(k)(hidden_PH, label_P, teacher, share_P)
        # the loop divides by all labels, of which a head lacks the first k of every document; and
        # it adds up the same names on every process, whatever the batch held there
        share = batch["loss_mask"].sum() / max(1, len(label_P))
        zero = loss.detach() * 0
        return loss, {name: sums.get(name, zero) * share for name in self._loss.names}

    def given(self, k: int, teacher_output: TeacherOutput) -> Tensor:
        """What head k reads at every position that has a token k + 1 places ahead, [R, X, F]."""
        return teacher_output.hidden_RSH[:, : -(k + 1)]

    @torch.no_grad()
    def _paces(self, batch: Batch, teacher_output: TeacherOutput, floor: float) -> list[Tensor]:
        """D-PACE's weights of every head's labels: a first pass, a chunk of logits at a time."""
        heads = range(1, self.medusa.config.heads + 1)
        said, anchors = [], []
        for k in heads:
            counts_RX = counted(batch, k)
            label_P = batch["input_ids"][:, k + 1 :][counts_RX]
            hidden_PH = self._hidden(k, counts_RX, teacher_output)
            said.append(self._chunked(k)(hidden_PH, label_P, only_label_q=True)[0])
            anchors.append(anchors_of(counts_RX, batch["input_ids"].shape[1]))
        return paced(said, anchors, batch["input_ids"].numel(), floor)

    def _hidden(self, k: int, counts_RX: Tensor, teacher_output: TeacherOutput) -> Tensor:
        """What head k's projection reads where it has a label, [P, H]."""
        return self.medusa.head(k, self.given(k, teacher_output)[counts_RX].to(self.medusa.dtype))

    def _chunked(self, k: int) -> nn.Module:
        """The projection of head k and its loss."""
        return self._frozen[0] if self.medusa.config.shared_head else self.losses[k - 1]

    def _teacher(self, hidden_PH: Tensor) -> Teacher:
        weight_VH = self._frozen[0].weight
        return Teacher(hidden_PH.to(weight_VH.dtype), weight_VH)


class MedusaObjective:
    """Trains the heads of `student` to foresee what the frozen `target` will say."""

    def __init__(self, student: MedusaStudent, target: PreTrainedModel, save: Save) -> None:
        self.module: nn.Module = student
        self._heads, self._target, self._save = student.medusa, target, save
        self.features: FeatureSource = OnlineFeatures(target)

    @torch.no_grad()
    def prepare(self, batch: Batch) -> TeacherOutput:
        """The target's last hidden states."""
        (hidden_RSH,) = self.features(batch)
        return TeacherOutput(hidden_RSH)

    def export(self, folder: Path) -> None:
        """A drafter checkpoint, as `drafters/` writes and reads it."""
        self._save(standalone(self._heads), folder)

    def draft(self) -> nn.Module:
        return self._heads


def build(medusa: MedusaConfig, objective: ObjectiveConfig, target: PreTrainedModel, save: Save) -> MedusaObjective:
    """Untrained heads for `target`, which is frozen here; errors as for `student`."""
    check_no_prefix(medusa)
    return MedusaObjective(student(MedusaHeads.for_target, MedusaStudent, medusa, objective, target), target, save)


def check_no_prefix(medusa: MedusaConfig) -> None:
    """Raise RequestError where a layer is asked for that Medusa's heads do not have."""
    if medusa.prefix:
        raise RequestError(
            "medusa.prefix is on, and Medusa's heads have no layer in front of them; leave it out, "
            "or train with method `hydra`"
        )


def student(
    heads: Callable[..., MedusaHeads],
    kind: type[MedusaStudent],
    medusa: MedusaConfig,
    objective: ObjectiveConfig,
    target: PreTrainedModel,
) -> MedusaStudent:
    """Untrained heads and their loss, `heads` making them for a target; freezes the target.

    Raises:
        RequestError: nothing would be learnt, or the target's logits are more than a projection.
    """
    check_terms(objective, places=medusa.heads)
    check_plain_logits(target)
    target.requires_grad_(False).eval()
    fresh = heads(target, heads=medusa.heads, layers=medusa.layers, shared_head=medusa.shared_head)
    head: Any = target.get_output_embeddings()
    return kind(fresh, head, medusa.decay, objective)


def run(*, medusa: MedusaConfig, objective: ObjectiveConfig, model: ModelConfig, **given: Unpack[Given]) -> Outcome:
    """Train heads into `out/drafter`, fresh ones or those that `model.start_from` names."""

    def make(target: Backbone, _rows: Prepared) -> MedusaObjective:
        goal = build(medusa, objective, target.model, saver(target, "medusa"))
        return warm_started(goal, model, target)

    return run_for_target(make, given)
