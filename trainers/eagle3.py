"""Train an EAGLE-3 drafter: fused hidden states in, several passes over its own outputs.

Li et al. 2025 (arXiv 2503.01840): no loss on features, only on distributions, and training sees what
drafting will see. The target runs frozen in the same process. Order of the file, as in every
trainer: what it requires and what is trained, the loss, the teacher's side, the run. Read next:
`drafters/eagle/net3.py`, the network; `eagle_common.py`, what is compared; `losses/draft_vocabulary.py`, how.

Shapes: R rows, S tokens of a row, P positions that count over all passes, H hidden size, F numbers of the
fused states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..data.rows.prepare import Prepared
from ..decoding.backbone.backbone import Backbone
from ..decoding.backbone.hidden_states import LAST
from ..drafters.eagle.net3 import Eagle3Net
from ..drafters.layers.row_split import WHOLE, RowSplit
from ..drafters.layers.static import Static, as_it_is
from ..drafters.projection import Projection
from .eagle_common import compared, in_text_order, reported, shares, told_by_pass
from .loop.loop import Outcome
from .loop.objective import Batch
from .loop.sharding import standalone
from .losses.chunked import ChunkedLoss
from .losses.draft_vocabulary import DraftVocabularyLoss, WholeTeacher, drafted
from .losses.mix import Mix
from .losses.terms import check_terms
from .pruning.sizes import check_not_pruned
from .sections import MakeProbe, Run, Sections
from .student.fused import chosen_layers, covered_by_half, draft_vocabulary, frequent_tokens, say_covered
from .student.warm_start import warm_started
from .teacher.features import FeatureSource, OnlineFeatures
from .teacher.frozen import Save, check_teacher, freeze, run_for_target, saver
from .teacher.output import Part, TeacherOutput, next_embeds

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: Sections) -> None:
    """Raise RequestError where `eagle3` and `objective` together teach nothing."""
    config = recipe.eagle3
    own = {"eagle3.ce": config.ce}
    check_terms(recipe.objective, own=own, positions=config.passes, counted_by="eagle3.passes")
    check_not_pruned(recipe.model)


def check_target(recipe: Sections, target: PreTrainedModel) -> None:
    """Raise RequestError for logits that training cannot make, rows beyond the context, or
    hidden states that the target does not have."""
    check_teacher(recipe, target)
    chosen_layers(recipe.eagle3.layers, target)


def student(recipe: Sections, target: PreTrainedModel, ids: Sequence[int] | None = None) -> Eagle3Net:
    """An untrained network for `target`; on the meta device its shapes alone.

    Its head begins as the target's rows of the draft vocabulary.

    Args:
        ids: the draft vocabulary, ascending target ids; None where its size alone matters.
    """
    config = recipe.eagle3
    return Eagle3Net.for_target(
        target,
        layers=chosen_layers(config.layers, target),
        ids=range(draft_vocabulary(config.vocabulary, target)) if ids is None else ids,
        feature_norms=config.feature_norms,
    )


def coverage(recipe: Sections, labels: Sequence[Sequence[int]]) -> str:
    """What the draft vocabulary would cover of texts' labels, in words."""
    return covered_by_half(labels, recipe.eagle3.vocabulary, "eagle3.vocabulary")


class Eagle3Student(nn.Module):
    """The network, unrolled over its own outputs, and the loss of every pass."""

    def __init__(self, draft: Eagle3Net, target: Projection, recipe: Sections) -> None:
        super().__init__()
        config = recipe.eagle3
        self.draft, self._config, self._objective = draft, config, recipe.objective
        self.split = WHOLE
        """The part of every row that is learnt from here; what is held of the target goes on behind it by a halo."""
        self.static: Static = as_it_is
        self._mix = Mix.of(recipe.objective, kl=0.0)
        loss = DraftVocabularyLoss(draft, config.passes, config.ce, self._mix)
        self.head = ChunkedLoss(draft.lm_head, loss, chunk=recipe.objective.chunk)
        # in a tuple it is no part of this module: the projection is the target's
        self._target = (target,)

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        fused_RSF, embeds_RSH = teacher_output.fused_RSF, teacher_output.embeds_RSH
        assert fused_RSF is not None  # `Eagle3Objective.prepare` makes both
        assert embeds_RSH is not None
        own = self.split.own(batch["input_ids"].shape[1])
        outputs = self.draft.unroll(
            self.draft.fuse(fused_RSF[:, : own.stop - own.start]),
            embeds_RSH,
            batch["positions"],
            batch["documents"],
            self._config.passes,
            recompute=self._config.recompute,
            split=self.split,
            static=self.static,
        )
        guess_PH, at_P, label_P2 = compared(outputs, batch, self.split)
        label_P, pass_P = label_P2.unbind(-1)
        label_P2 = torch.stack([drafted(label_P, self.draft.ids_U), pass_P], 1)
        hidden_PH = self.draft.head_input(guess_PH)
        share_P = shares(label_P2, hidden_PH, self.head, batch, self._config, self._objective, self.split)
        at_P, hidden_PH, label_P2, share_P = in_text_order(at_P, hidden_PH, label_P2, share_P)
        (target,) = self._target
        teacher = WholeTeacher.of(
            teacher_output.hidden_RSH.flatten(0, 1), target, at_P, ids_U=self.draft.ids_U, mix=self._mix
        )
        told_P = told_by_pass(at_P, label_P2[:, 1], batch, self._config.passes, self.split)
        loss, terms = self.head(hidden_PH, label_P2, teacher, share_P, told_P=told_P, static=self.static)
        return loss, reported(loss, terms, told_P, label_P2[:, 1], self._config.passes)


class Eagle3Objective:
    """Trains `draft` to have the distribution of the frozen `target` along its own drafts."""

    def __init__(self, recipe: Sections, draft: Eagle3Net, target: PreTrainedModel, save: Save) -> None:
        self.module: nn.Module = Eagle3Student(draft, Projection.of(freeze(target)), recipe)
        self.features: FeatureSource = OnlineFeatures(target, (*draft.config.layers, LAST))
        self._ahead = recipe.eagle3.passes
        self._draft, self._target, self._save = draft, target, save

    @torch.no_grad()
    def prepare(self, batch: Batch) -> TeacherOutput:
        """The target's hidden states and the embeddings of the tokens behind them."""
        *fused, hidden_RSH = self.features(batch)
        embeds_RSH = next_embeds(self._target, batch, self.features.part)
        return TeacherOutput(hidden_RSH, embeds_RSH, torch.cat(fused, -1))

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
    """Train a drafter into `out/drafter`; terms of `objective` are added to those of `eagle3`.

    It is fresh, or the one that `model.start_from` names, with that one's draft vocabulary.
    """
    check_recipe(recipe)

    def build(target: Backbone, rows: Prepared) -> Eagle3Objective:
        ids = frequent_tokens(rows.train, min(recipe.eagle3.vocabulary, target.vocabulary))
        net = student(recipe, target.model, ids)
        objective = warm_started(Eagle3Objective(recipe, net, target.model, saver(target, "eagle3")), recipe, target)
        say_covered(rows.train, net.ids_U.tolist())
        return objective

    return run_for_target(build, Run(recipe, out, resume, make_probe), check_target=check_target)
