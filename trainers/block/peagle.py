"""Train a P-EAGLE drafter: EAGLE-3's loss, every depth out of one pass, over mask pairs in place of own outputs.

P-EAGLE, 2026 (arXiv 2602.01469). Depth 0 are the true pairs of the row; mask pairs stand behind some of them, fewer
the deeper (`branches.py`), and only those are computed. Order of the file, as in every trainer: what it requires and
what is trained, the loss, the teacher's side, how a run begins. Read next: `drafters/eagle/peagle.py`, the network;
`branches.py`; `../losses/draft_vocabulary.py`, what is minimised.

Shapes: R rows, S tokens of a row, A anchors of a row, P pairs that count over all depths, U tokens of the draft
vocabulary, H hidden size, F numbers of the fused states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...data.rows.prepare import Prepared
from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.hidden_states import LAST
from ...decoding.on_host import on_host, places, sent
from ...drafters.eagle.peagle import PeagleNet
from ...drafters.projection import Projection
from ..labels import check_in_rows, label_places
from ..loop.objective import Batch, Objective
from ..losses.chunked import ChunkedLoss, SharedTeacher, Teacher
from ..losses.draft_vocabulary import DraftVocabularyLoss
from ..losses.mix import Mix
from ..losses.pace import joined
from ..losses.terms import check_terms
from ..own_drafts.places import check_own_drafts
from ..packed.passes import are_long
from ..pruning.sizes import check_not_pruned
from ..recipe import Run, TrainingRecipe
from ..spine import DrafterObjective, begun
from ..student.compared import Drafts, Student
from ..student.drafted import Draw, Where
from ..student.fused import chosen_layers, drafted_ids
from ..teacher.frozen import Save
from .anchors import HELD_OUT_SEED
from .branches import Sampled, sampled

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where `peagle` and `objective` together teach nothing."""
    config = recipe.peagle
    own = {"peagle.ce": config.ce}
    check_terms(recipe.objective, own=own, positions=config.depths, counted_by="peagle.depths")
    check_in_rows(recipe, config.depths, "peagle.depths")
    check_not_pruned(recipe.model)
    check_own_drafts(recipe)


def check_target(recipe: TrainingRecipe, target: PreTrainedModel) -> None:
    """Raise RequestError for hidden states that the target does not have."""
    chosen_layers(recipe.peagle.layers, target, "peagle.layers")


def student(recipe: TrainingRecipe, target: PreTrainedModel, ids: Sequence[int] | None = None) -> PeagleNet:
    """An untrained network for `target`; on the meta device its shapes alone.

    Args:
        ids: the draft vocabulary, ascending target ids; None where its size alone matters.
    """
    config = recipe.peagle
    return PeagleNet.for_target(
        target,
        ids=drafted_ids(config.vocabulary, target, ids),
        layers=chosen_layers(config.layers, target, "peagle.layers"),
        decoder_layers=config.decoder_layers,
    )


class PeagleTeacher(NamedTuple):
    """The target's numbers for one batch, and which mask pairs are computed."""

    hidden_RSH: Tensor
    """The last hidden states, which its output projection reads."""
    embeds_RSH: Tensor
    """Its embedding of the token behind each position."""
    fused_RSF: Tensor
    branches: Sampled


class PeagleStudent(Student):
    """The network over true pairs and mask pairs, and the loss of every depth."""

    compiles = False

    draft: PeagleNet

    def __init__(self, draft: PeagleNet, target: Projection, recipe: TrainingRecipe) -> None:
        config = self._config = recipe.peagle
        mix = Mix.of(recipe.objective, kl=0.0)
        loss = DraftVocabularyLoss(draft, config.depths, config.ce, mix)
        judge = ChunkedLoss(draft.lm_head, loss, chunk=recipe.objective.chunk)
        super().__init__(
            draft, judge, recipe.objective, drafts=config.depths, decay=config.decay, frozen=False, mix=mix
        )
        # in a tuple it is no part of this module: the projection is the target's
        self._target = (target,)

    def forward(self, batch: Batch, teacher_output: PeagleTeacher) -> tuple[Tensor, dict[str, Tensor]]:
        branches = teacher_output.branches
        outputs = self.draft.drafts(
            self.draft.fuse(teacher_output.fused_RSF),
            teacher_output.embeds_RSH,
            batch["positions"],
            batch["documents"],
            branches.at_RA,
            branches.counts,
            masked=not are_long(batch["input_ids"].shape[1]),
            recompute=self._config.recompute,
        )
        drafts = _compared(outputs, batch, branches)
        hidden_PH = self.draft.head_input(drafts.hidden_PH)
        return self.compare(drafts._replace(hidden_PH=hidden_PH), batch, teacher_output)

    def drafts_behind(self, batch: Batch, given: PeagleTeacher, where: Where, draw: Draw, _embed: Any) -> Tensor:
        """As of `DraftsBehind`: mask pairs behind every place, all of them in one pass."""
        A = where.at_RA.shape[1]
        first_RSH, *deeper = self.draft.drafts(
            self.draft.fuse(given.fused_RSF),
            given.embeds_RSH,
            batch["positions"],
            batch["documents"],
            where.at_RA,
            [A] * (self._drafts - 1),
            recompute=self._config.recompute,
        )
        found = [first_RSH[where.row_X, where.at_X], *(out_RAH[where.row_X, where.number_X] for out_RAH in deeper)]
        hidden_XJH = self.draft.head_input(torch.stack(found, 1))
        for hidden_XH in hidden_XJH.unbind(1):
            draw(hidden_XH)
        return hidden_XJH

    def teacher(self, given: PeagleTeacher, at_P: Tensor) -> Teacher:
        """The target's distributions over its whole vocabulary, cut to the draft's."""
        (target,), states_NH = self._target, given.hidden_RSH.flatten(0, 1)
        return SharedTeacher.of(states_NH, target, at_P, cut=self.cut)


def _compared(outputs: Sequence[Tensor], batch: Batch, branches: Sampled) -> Drafts:
    """Pair the outputs of `PeagleNet.drafts` with their labels: depth d at t has x_{t+2+d}."""
    (R, S), device = batch["input_ids"].shape, batch["input_ids"].device
    row_P, true_P = label_places(batch, 2)
    hidden, anchors = [outputs[0][row_P, true_P]], [joined((on_host(row_P), on_host(true_P)), S)]
    pair_RA = torch.arange(R)[:, None] * S + on_host(branches.at_RA)
    for out_RAH, known_RA in zip(outputs[1:], map(on_host, branches.known), strict=True):
        hidden.append(out_RAH[places(known_RA, device)])
        anchors.append(pair_RA[:, : known_RA.shape[1]][known_RA])
    at_P = torch.cat([anchor_P + 1 + d for d, anchor_P in enumerate(anchors)])
    depth_P = torch.cat([torch.full_like(anchor_P, d) for d, anchor_P in enumerate(anchors)])
    label_P2 = torch.stack([on_host(batch["input_ids"]).flatten()[at_P + 1], depth_P], 1)
    return Drafts(torch.cat(hidden), sent(at_P, device), sent(label_P2, device))


class PeagleObjective(DrafterObjective):
    """Trains `draft` to have the distribution of the frozen `target` at every depth of its drafts."""

    def __init__(self, recipe: TrainingRecipe, draft: PeagleNet, target: PreTrainedModel, save: Save) -> None:
        goal, layers = PeagleStudent(draft, Projection.of(target), recipe), (*draft.config.layers, LAST)
        super().__init__(goal, draft, target, save, layers=layers, reads_tokens=True)
        self._config, self._seed = recipe.peagle, HELD_OUT_SEED

    def begin_step(self, _step: int, seed: int) -> None:
        """Mask pairs of this step stand elsewhere than the last one's."""
        self._seed = seed

    def prepare(self, batch: Batch) -> PeagleTeacher:
        """The target's hidden states, the embeddings of the tokens behind them, and where mask pairs stand."""
        config: Any = self._config
        seed = self._seed if self.module.training else HELD_OUT_SEED
        branches = sampled(batch, config.depths, config.kept, config.kept_least, seed)
        hidden_RSH, embeds_RSH, fused_RSF = super().prepare(batch)
        return PeagleTeacher(hidden_RSH, embeds_RSH, fused_RSF, branches)


def build(run: Run, target: Backbone, rows: Prepared) -> Objective:
    """What a run trains: a fresh network, or the one that `model.start_from` names, with its draft vocabulary."""
    return begun(PeagleObjective, student, run, target, rows)
