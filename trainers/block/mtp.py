"""Train an MTP module: the target's last state and the next token in, applied to its own states again.

FastMTP (2025, arXiv 2509.18362): one module for all depths, its weights shared, the loss of depth j weighted by
beta^j, the target and its projection frozen. There every depth attends to states of its own depth, which drafting
never sees; here later passes see the first one's keys of true tokens and their own chain, EAGLE-3's training-time
test. Order of the file, as in every trainer: what it requires and what is trained, the loss, the teacher's side, the
run. Read next: `drafters/mtp/net.py`, the network; `../eagle_common.py`, what is compared.

Shapes: R rows, S tokens of a row, P positions that count over all passes, H hidden size.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...data.rows.prepare import Prepared
from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.hidden_states import LAST, UNNORMED
from ...drafters.layers.row_split import WHOLE, RowSplit
from ...drafters.layers.static import Static, as_it_is
from ...drafters.mtp.net import MtpNet
from ...drafters.mtp.own import own_shape, own_weights
from ...drafters.projection import Shaping
from ...errors import RequestError
from ..eagle_common import compared, in_text_order, reported, shares, told_by_pass
from ..labels import check_in_rows
from ..loop.loop import Outcome
from ..loop.objective import Batch
from ..loop.sharding import standalone
from ..losses.chunked import ChunkedLoss, SharedTeacher
from ..losses.mix import Mix
from ..losses.terms import check_terms
from ..pruning.sizes import check_not_pruned
from ..sections import MakeProbe, Run, Sections
from ..student.warm_start import warm_started
from ..teacher.features import FeatureSource, OnlineFeatures
from ..teacher.frozen import Save, check_teacher, freeze, run_for_target, saver
from ..teacher.output import Part, TeacherOutput, next_embeds
from .student import BlockLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


def check_recipe(recipe: Sections) -> None:
    """Raise RequestError where nothing would be learnt, or an engine would be asked for a state that it has not."""
    check_terms(recipe.objective, positions=recipe.mtp.passes, counted_by="mtp.passes")
    check_in_rows(recipe, recipe.mtp.passes, "mtp.passes")
    check_not_pruned(recipe.model)
    if recipe.mtp.state == "before" and recipe.features.source == "engine":
        raise RequestError(
            "mtp.state is before, and features.source is engine, which hands out the last state behind its norm "
            "alone: set mtp.state to behind, or features.source to online or cache"
        )


def check_target(recipe: Sections, target: PreTrainedModel) -> None:
    """Raise RequestError for logits that training cannot make, or rows beyond the context."""
    check_teacher(recipe, target)


def student(recipe: Sections, target: PreTrainedModel) -> MtpNet:
    """An untrained network for `target`, of the sizes of its own module where the recipe begins with that; on the
    meta device its shapes alone."""
    config = recipe.mtp
    if not config.from_target:
        return MtpNet.for_target(target, state=config.state)
    given = recipe.target
    return MtpNet(own_shape(given.path, target.config, revision=given.revision, state=config.state))


def began(recipe: Sections, target: PreTrainedModel) -> MtpNet:
    """`student` with the weights that it begins with: fresh ones, or those of the target's own module."""
    net = student(recipe, target)
    if recipe.mtp.from_target and recipe.model.start_from is None:
        given = recipe.target
        net.load_state_dict(own_weights(given.path, target.config, revision=given.revision))
        _log.info("the module is initialised from the target's own, %s", given.path)
    return net


class MtpStudent(nn.Module):
    """The module, unrolled over its own states, and the recipe's mix of terms at every depth."""

    def __init__(self, draft: MtpNet, target: Any, recipe: Sections) -> None:
        super().__init__()
        self.draft, self._config, self._objective = draft, recipe.mtp, recipe.objective
        self.split = WHOLE
        """The part of every row that is learnt from here; what is held of the target goes on behind it by a halo."""
        self.static: Static = as_it_is
        loss = BlockLoss(Mix.of(recipe.objective), recipe.mtp.passes)
        # in a tuple it is no part of this module: the head is the target's, and what wraps,
        # shards or saves this module must not touch it
        head, shaping = target.get_output_embeddings(), Shaping.of(target)
        self._frozen = (ChunkedLoss(head, loss, chunk=recipe.objective.chunk, shaping=shaping),)

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_RSH, embeds_RSH = teacher_output.hidden_RSH, teacher_output.embeds_RSH
        assert embeds_RSH is not None  # `MtpObjective.prepare` makes them
        read_RSH = hidden_RSH if teacher_output.fused_RSF is None else teacher_output.fused_RSF
        own = self.split.own(batch["input_ids"].shape[1])
        outputs = self.draft.unroll(
            self.draft.fuse(read_RSH[:, : own.stop - own.start]),
            embeds_RSH,
            batch["positions"],
            batch["documents"],
            self._config.passes,
            recompute=self._config.recompute,
            split=self.split,
            static=self.static,
        )
        guess_PH, at_P, label_P2 = compared(outputs, batch, self.split)
        guess_PH = self.draft.head_input(guess_PH)
        (head,) = self._frozen
        share_P = self._shares(guess_PH, label_P2, batch)
        at_P, guess_PH, label_P2, share_P = in_text_order(at_P, guess_PH, label_P2, share_P)
        teacher = SharedTeacher.of(hidden_RSH.flatten(0, 1), head.projection, at_P)
        told_P = told_by_pass(at_P, label_P2[:, 1], batch, self._config.passes, self.split)
        loss, terms = head(guess_PH, label_P2, teacher, share_P, told_P=told_P, static=self.static)
        return loss, reported(loss, terms, told_P, label_P2[:, 1], self._config.passes)

    def _shares(self, guess_PH: Tensor, label_P2: Tensor, batch: Batch) -> Tensor | None:
        """How much every position counts, fp32 [P]: a fixed decay adds up to 1 over the passes."""
        (head,) = self._frozen
        share_P = shares(label_P2, guess_PH, head, batch, self._config, self._objective, self.split)
        if self._objective.positions != "geometric":
            return share_P
        whole = sum(self._config.decay**j for j in range(self._config.passes))
        return guess_PH.new_full((len(guess_PH),), 1 / whole) if share_P is None else share_P / whole


class MtpObjective:
    """Trains `draft` to have the distribution of the frozen `target` along its own drafts."""

    def __init__(self, recipe: Sections, draft: MtpNet, target: PreTrainedModel, save: Save) -> None:
        self.module: nn.Module = MtpStudent(draft, freeze(target), recipe)
        self._before = draft.reads == UNNORMED
        self.features: FeatureSource = OnlineFeatures(target, (UNNORMED, LAST) if self._before else (LAST,))
        self._ahead = recipe.mtp.passes
        self._draft, self._target, self._save = draft, target, save

    @torch.no_grad()
    def prepare(self, batch: Batch) -> TeacherOutput:
        """The target's last states, before their norm too where they are read there, and the embeddings of the tokens
        behind them."""
        *before, hidden_RSH = self.features(batch)
        return TeacherOutput(hidden_RSH, next_embeds(self._target, batch, self.features.part), *before)

    def split_rows(self, split: RowSplit) -> None:
        """Learn from a part of every row; what the target gives goes on behind it for the later passes."""
        self.module.split = split  # type: ignore[assignment]
        self.features.part = Part(split, self._ahead)

    def export(self, folder: Path) -> None:
        """Write a drafter folder."""
        self._save(standalone(self._draft), folder)

    def draft(self) -> nn.Module:
        return self._draft


def run(recipe: Sections, out: Path, resume: str = "auto", make_probe: MakeProbe | None = None) -> Outcome:
    """Train a drafter into `out/drafter`: a fresh one, the target's own, or that which `model.start_from` names."""
    check_recipe(recipe)

    def build(target: Backbone, _rows: Prepared) -> MtpObjective:
        objective = MtpObjective(recipe, began(recipe, target.model), target.model, saver(target, "mtp"))
        return warm_started(objective, recipe, target)

    return run_for_target(build, Run(recipe, out, resume, make_probe), check_target=check_target)
