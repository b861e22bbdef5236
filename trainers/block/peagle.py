"""Train a P-EAGLE drafter: EAGLE-3's loss, every depth out of one pass, over mask pairs in place of own outputs.

P-EAGLE, 2026 (arXiv 2602.01469). Depth 0 are the true pairs of the row; mask pairs stand behind some of them, fewer
the deeper (`branches.py`), and only those are computed. Order of the file, as in every trainer: what it requires
and what is trained, the loss, the teacher's side, the run. Read next: `drafters/eagle/peagle.py`, the network;
`branches.py`; `../losses/draft_vocabulary.py`, what is minimised.

Shapes: R rows, S tokens of a row, A anchors of a row, P pairs that count over all depths, U tokens of the draft
vocabulary, H hidden size, F numbers of the fused states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...data.rows.prepare import Prepared
from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.hidden_states import LAST
from ...decoding.on_host import on_host, places, sent
from ...drafters.eagle.peagle import PeagleNet
from ...drafters.projection import Projection
from ..eagle_common import in_text_order, reported, told_by_row
from ..labels import check_in_rows, label_places
from ..loop.loop import Outcome
from ..loop.objective import Batch
from ..loop.sharding import standalone
from ..losses.chunked import ChunkedLoss
from ..losses.draft_vocabulary import DraftVocabularyLoss, WholeTeacher, drafted
from ..losses.mix import Mix
from ..losses.pace import geometric, joined, paced
from ..losses.terms import check_terms
from ..packed.passes import are_long
from ..pruning.sizes import check_not_pruned
from ..sections import MakeProbe, Run, Sections
from ..student.fused import chosen_layers, covered_by_half, draft_vocabulary, frequent_tokens, say_covered
from ..student.warm_start import warm_started
from ..teacher.features import FeatureSource, OnlineFeatures
from ..teacher.frozen import Save, check_teacher, freeze, run_for_target, saver
from ..teacher.output import next_embeds
from .anchors import HELD_OUT_SEED
from .branches import Sampled, sampled

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: Sections) -> None:
    """Raise RequestError where `peagle` and `objective` together teach nothing."""
    config = recipe.peagle
    own = {"peagle.ce": config.ce}
    check_terms(recipe.objective, own=own, positions=config.depths, counted_by="peagle.depths")
    check_in_rows(recipe, config.depths, "peagle.depths")
    check_not_pruned(recipe.model)


def check_target(recipe: Sections, target: PreTrainedModel) -> None:
    """Raise RequestError for logits that training cannot make, rows beyond the context, or
    hidden states that the target does not have."""
    check_teacher(recipe, target)
    chosen_layers(recipe.peagle.layers, target, "peagle.layers")


def student(recipe: Sections, target: PreTrainedModel, ids: Sequence[int] | None = None) -> PeagleNet:
    """An untrained network for `target`; on the meta device its shapes alone.

    Args:
        ids: the draft vocabulary, ascending target ids; None where its size alone matters.
    """
    config = recipe.peagle
    return PeagleNet.for_target(
        target,
        ids=range(draft_vocabulary(config.vocabulary, target)) if ids is None else ids,
        layers=chosen_layers(config.layers, target, "peagle.layers"),
        decoder_layers=config.decoder_layers,
    )


def coverage(recipe: Sections, labels: Sequence[Sequence[int]]) -> str:
    """What the draft vocabulary would cover of texts' labels, in words."""
    return covered_by_half(labels, recipe.peagle.vocabulary, "peagle.vocabulary")


class PeagleTeacher(NamedTuple):
    """The target's numbers for one batch, and which mask pairs are computed."""

    hidden_RSH: Tensor
    """The last hidden states, which its output projection reads."""
    embeds_RSH: Tensor
    """Its embedding of the token behind each position."""
    fused_RSF: Tensor
    branches: Sampled


class _Compared(NamedTuple):
    """Outputs where they count, depth after depth, and what each is compared with."""

    guess_PH: Tensor
    at_P: Tensor
    """int64: the number of the target's state in front of the label, counted through rows."""
    label_P2: Tensor
    """int64: the label and the depth, from 0."""
    anchors: list[Tensor]
    """int64, of every depth: the anchors, counted through rows."""


class PeagleStudent(nn.Module):
    """The network over true pairs and mask pairs, and the loss of every depth."""

    def __init__(self, draft: PeagleNet, target: Projection, recipe: Sections) -> None:
        super().__init__()
        self.draft, self._config, self._objective = draft, recipe.peagle, recipe.objective
        self._mix = Mix.of(recipe.objective, kl=0.0)
        loss = DraftVocabularyLoss(draft, recipe.peagle.depths, recipe.peagle.ce, self._mix)
        self.head = ChunkedLoss(draft.lm_head, loss, chunk=recipe.objective.chunk)
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
        guess_PH, at_P, label_P2, anchors = _compared(outputs, batch, branches)
        label_P, depth_P = label_P2.unbind(-1)
        label_P2 = torch.stack([drafted(label_P, self.draft.ids_U), depth_P], 1)
        hidden_PH = self.draft.head_input(guess_PH)
        share_P = self._shares(label_P2, hidden_PH, anchors, batch)
        at_P, hidden_PH, label_P2, share_P = in_text_order(at_P, hidden_PH, label_P2, share_P)
        (target,) = self._target
        states_NH = teacher_output.hidden_RSH.flatten(0, 1)
        teacher = WholeTeacher.of(states_NH, target, at_P, ids_U=self.draft.ids_U, mix=self._mix)
        told_P = told_by_row(at_P, label_P2[:, 1], batch)
        loss, terms = self.head(hidden_PH, label_P2, teacher, share_P, told_P=told_P)
        return loss, reported(loss, terms, told_P, label_P2[:, 1], self._config.depths)

    def _shares(self, label_P2: Tensor, hidden_PH: Tensor, anchors: list[Tensor], batch: Batch) -> Tensor | None:
        """How much every pair counts, fp32 [P]; None where all count alike."""
        label_P, depth_P = label_P2.unbind(-1)
        if self._objective.positions == "geometric":
            return geometric(depth_P, self._config.decay)
        q_P, _ = self.head(hidden_PH, label_P, only_label_q=True)
        q = q_P.split([len(anchor_P) for anchor_P in anchors])
        return torch.cat(paced(q, anchors, batch["input_ids"].numel(), self._objective.pace_floor))


def _compared(outputs: Sequence[Tensor], batch: Batch, branches: Sampled) -> _Compared:
    """Pair the outputs of `PeagleNet.drafts` with their labels: depth d at t has x_{t+2+d}."""
    (R, S), device = batch["input_ids"].shape, batch["input_ids"].device
    row_P, true_P = label_places(batch, 2)
    guess, anchors = [outputs[0][row_P, true_P]], [joined((on_host(row_P), on_host(true_P)), S)]
    pair_RA = torch.arange(R)[:, None] * S + on_host(branches.at_RA)
    for out_RAH, known_RA in zip(outputs[1:], map(on_host, branches.known), strict=True):
        guess.append(out_RAH[places(known_RA, device)])
        anchors.append(pair_RA[:, : known_RA.shape[1]][known_RA])
    at_P = torch.cat([anchor_P + 1 + d for d, anchor_P in enumerate(anchors)])
    depth_P = torch.cat([torch.full_like(anchor_P, d) for d, anchor_P in enumerate(anchors)])
    label_P2 = torch.stack([on_host(batch["input_ids"]).flatten()[at_P + 1], depth_P], 1)
    sent_anchors = [sent(anchor_P, device) for anchor_P in anchors]
    return _Compared(torch.cat(guess), sent(at_P, device), sent(label_P2, device), sent_anchors)


class PeagleObjective:
    """Trains `draft` to have the distribution of the frozen `target` at every depth of its drafts."""

    def __init__(self, recipe: Sections, draft: PeagleNet, target: PreTrainedModel, save: Save) -> None:
        self.module: nn.Module = PeagleStudent(draft, Projection.of(freeze(target)), recipe)
        self.features: FeatureSource = OnlineFeatures(target, (*draft.config.layers, LAST))
        self._draft, self._target, self._save, self._config = draft, target, save, recipe.peagle
        self._seed = HELD_OUT_SEED

    def begin_step(self, _step: int, seed: int) -> None:
        """Mask pairs of this step stand elsewhere than the last one's."""
        self._seed = seed

    @torch.no_grad()
    def prepare(self, batch: Batch) -> PeagleTeacher:
        """The target's hidden states, the embeddings of the tokens behind them, and where mask pairs stand."""
        *fused, hidden_RSH = self.features(batch)
        config: Any = self._config
        seed = self._seed if self.module.training else HELD_OUT_SEED
        branches = sampled(batch, config.depths, config.kept, config.kept_least, seed)
        return PeagleTeacher(hidden_RSH, next_embeds(self._target, batch), torch.cat(fused, -1), branches)

    def export(self, folder: Path) -> None:
        """Write a drafter folder."""
        self._save(standalone(self._draft), folder)

    def draft(self) -> nn.Module:
        return self._draft


def run(recipe: Sections, out: Path, resume: str = "auto", make_probe: MakeProbe | None = None) -> Outcome:
    """Train a drafter into `out/drafter`; terms of `objective` are added to those of `peagle`.

    It is fresh, or the one that `model.start_from` names, with that one's draft vocabulary.
    """
    check_recipe(recipe)

    def build(target: Backbone, rows: Prepared) -> PeagleObjective:
        ids = frequent_tokens(rows.train, min(recipe.peagle.vocabulary, target.vocabulary))
        net = student(recipe, target.model, ids)
        objective = warm_started(PeagleObjective(recipe, net, target.model, saver(target, "peagle")), recipe, target)
        say_covered(rows.train, net.ids_U.tolist())
        return objective

    return run_for_target(build, Run(recipe, out, resume, make_probe), check_target=check_target)
