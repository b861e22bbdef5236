"""Train an MTP module: the target's last state and the next token in, applied to its own states again.

FastMTP (2025, arXiv 2509.18362): one module for all depths, its weights shared, the loss of depth j weighted by
beta^j, the target and its projection frozen. There every depth attends to states of its own depth, which drafting
never sees; here later passes see the first one's keys of true tokens and their own chain, EAGLE-3's training-time
test. Order of the file, as in every trainer: what it requires and what is trained, the loss, the teacher's side, how a
run begins. Read next: `drafters/mtp/net.py`, the network; `../student/compared.py`, what is compared.

Shapes: R rows, S tokens of a row, P positions that count over all passes, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...data.rows.prepare import Prepared
from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.hidden_states import LAST, UNNORMED
from ...drafters.layers.draft_vocabulary import count_of
from ...drafters.mtp.net import MtpNet
from ...drafters.mtp.own import own_shape, own_weights
from ...drafters.projection import Shaping
from ...errors import RequestError
from ..labels import check_in_rows
from ..loop.objective import Batch, Objective
from ..losses.chunked import ChunkedLoss
from ..losses.mix import Mix
from ..losses.terms import check_terms
from ..own_drafts.places import check_own_drafts
from ..pruning.sizes import check_not_pruned
from ..recipe import Run, TrainingRecipe
from ..spine import DrafterObjective, begun
from ..student.compared import Student
from ..student.drafted import Draw, Where
from ..student.fused import drafted_ids
from ..teacher.frozen import Save
from ..teacher.output import TeacherOutput
from .student import BlockLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where nothing would be learnt, or an engine would be asked for a state that it has not."""
    check_terms(recipe.objective, positions=recipe.mtp.passes, counted_by="mtp.passes")
    check_in_rows(recipe, recipe.mtp.passes, "mtp.passes")
    check_not_pruned(recipe.model)
    check_own_drafts(recipe)
    if recipe.mtp.state == "before" and recipe.features.source == "engine":
        raise RequestError(
            "mtp.state is before, and features.source is engine, which hands out the last state behind its norm "
            "alone: set mtp.state to behind, or features.source to online or cache"
        )


def student(recipe: TrainingRecipe, target: PreTrainedModel, ids: Sequence[int] | None = None) -> MtpNet:
    """An untrained network for `target`, of the sizes of its own module where the recipe begins with that; on the
    meta device its shapes alone. `ids`: as of `drafted_ids`."""
    config, given = recipe.mtp, recipe.target
    ids = drafted_ids(config.vocabulary, target, ids)
    if not config.from_target:
        return MtpNet.for_target(target, state=config.state, ids=ids)
    own = own_shape(given.path, target.config, revision=given.revision, state=config.state)
    return MtpNet(replace(own, draft_vocabulary=count_of(ids)), ids)


def began(recipe: TrainingRecipe, target: PreTrainedModel, ids: Sequence[int] | None = None) -> MtpNet:
    """`student` with the weights that it begins with: fresh ones, or those of the target's own module."""
    net = student(recipe, target, ids)
    if recipe.mtp.from_target and recipe.model.start_from is None:
        given = recipe.target
        # the draft vocabulary, if there is one, is no part of the target's module
        net.load_state_dict(net.state_dict() | own_weights(given.path, target.config, revision=given.revision))
        _log.info("the module is initialised from the target's own, %s", given.path)
    return net


class MtpStudent(Student):
    """The module, unrolled over its own states, and the recipe's mix of terms at every depth."""

    draft: MtpNet

    def __init__(self, draft: MtpNet, target: Any, recipe: TrainingRecipe) -> None:
        config = self._config = recipe.mtp
        mix = Mix.of(recipe.objective)
        loss = BlockLoss(mix, config.passes)
        head, shaping = target.get_output_embeddings(), Shaping.of(target)
        judge = ChunkedLoss(head, loss, chunk=recipe.objective.chunk, shaping=shaping, over=draft)
        super().__init__(
            draft, judge, recipe.objective, drafts=config.passes, decay=config.decay, sums_to_one=True, mix=mix
        )

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_RSH, embeds_RSH, before_RSH = teacher_output
        assert embeds_RSH is not None  # `MtpObjective` asks for them
        read_RSH = hidden_RSH if before_RSH is None else before_RSH
        hidden_RLH = self.draft.fuse(self.own(read_RSH, batch))
        drafts = self.unrolled(hidden_RLH, embeds_RSH, batch, recompute=self._config.recompute)
        return self.compare(drafts._replace(hidden_PH=self.projected(drafts.hidden_PH)), batch, teacher_output)

    def drafts_behind(self, batch: Batch, given: TeacherOutput, places: Where, draw: Draw, embed: Any) -> Tensor:
        """As of `DraftsBehind`."""
        hidden_RSH, embeds_RSH, before_RSH = given
        assert embeds_RSH is not None
        read_RSH, again = self.draft.fuse(hidden_RSH if before_RSH is None else before_RSH), self._config.recompute
        found = self.unrolled_behind(read_RSH, embeds_RSH, batch, places, draw, embed, recompute=again)
        return self.projected(torch.stack(found, 1))

    def projected(self, hidden_XH: Tensor) -> Tensor:
        """Behind the norm, once."""
        return self.draft.head_input(hidden_XH)


class MtpObjective(DrafterObjective):
    """Trains `draft` to have the distribution of the frozen `target` along its own drafts."""

    def __init__(self, recipe: TrainingRecipe, draft: MtpNet, target: PreTrainedModel, save: Save) -> None:
        layers = (UNNORMED, LAST) if draft.reads == UNNORMED else (LAST,)
        goal = MtpStudent(draft, target, recipe)
        super().__init__(goal, draft, target, save, layers=layers, reads_tokens=True, ahead=recipe.mtp.passes)


def build(run: Run, target: Backbone, rows: Prepared) -> Objective:
    """What a run trains: a fresh module, the target's own, or that which `model.start_from` names."""
    return begun(MtpObjective, began, run, target, rows)
