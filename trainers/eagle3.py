"""Train an EAGLE-3 drafter: fused hidden states in, several passes over its own outputs.

Li et al. 2025 (arXiv 2503.01840): no loss on features, only on distributions, and training sees what
drafting will see. The target runs frozen in the same process. Order of the file, as in every
trainer: what it requires and what is trained, the loss, the teacher's side, how a run begins. Read next:
`drafters/eagle/net3.py`, the network; `spine.py`, the run; `student/compared.py`, what is compared;
`losses/draft_vocabulary.py`, how.

Shapes: R rows, S tokens of a row, P positions that count over all passes, H hidden size, F numbers of the
fused states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.rows.prepare import Prepared
from ..decoding.backbone.backbone import Backbone
from ..decoding.backbone.hidden_states import LAST
from ..drafters.eagle.net3 import Eagle3Net
from ..drafters.projection import Projection
from .loop.objective import Batch, Objective
from .losses.chunked import ChunkedLoss, SharedTeacher, Teacher
from .losses.draft_vocabulary import DraftVocabularyLoss
from .losses.mix import Mix
from .losses.terms import check_terms
from .own_drafts.places import check_own_drafts
from .pruning.sizes import check_not_pruned
from .recipe import Run, TrainingRecipe
from .spine import DrafterObjective, begun
from .student.compared import Student
from .student.drafted import Draw, Where
from .student.fused import chosen_layers, drafted_ids
from .teacher.frozen import Save
from .teacher.output import TeacherOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where `eagle3` and `objective` together teach nothing."""
    config = recipe.eagle3
    own = {"eagle3.ce": config.ce}
    check_terms(recipe.objective, own=own, positions=config.passes, counted_by="eagle3.passes")
    check_not_pruned(recipe.model)
    check_own_drafts(recipe)


def check_target(recipe: TrainingRecipe, target: PreTrainedModel) -> None:
    """Raise RequestError for hidden states that the target does not have."""
    chosen_layers(recipe.eagle3.layers, target)


def student(recipe: TrainingRecipe, target: PreTrainedModel, ids: Sequence[int] | None = None) -> Eagle3Net:
    """An untrained network for `target`; on the meta device its shapes alone.

    Its head begins as the target's rows of the draft vocabulary.

    Args:
        ids: the draft vocabulary, ascending target ids; None where its size alone matters.
    """
    config = recipe.eagle3
    return Eagle3Net.for_target(
        target,
        layers=chosen_layers(config.layers, target),
        ids=drafted_ids(config.vocabulary, target, ids),
        feature_norms=config.feature_norms,
    )


class Eagle3Student(Student):
    """The network, unrolled over its own outputs, and the loss of every pass."""

    draft: Eagle3Net

    def __init__(self, draft: Eagle3Net, target: Projection, recipe: TrainingRecipe) -> None:
        config = self._config = recipe.eagle3
        mix = Mix.of(recipe.objective, kl=0.0)
        loss = DraftVocabularyLoss(draft, config.passes, config.ce, mix)
        judge = ChunkedLoss(draft.lm_head, loss, chunk=recipe.objective.chunk)
        super().__init__(
            draft, judge, recipe.objective, drafts=config.passes, decay=config.decay, frozen=False, mix=mix
        )
        # in a tuple it is no part of this module: the projection is the target's
        self._target = (target,)

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        fused_RSF, embeds_RSH = teacher_output.fused_RSF, teacher_output.embeds_RSH
        assert fused_RSF is not None  # `Eagle3Objective` asks for both
        assert embeds_RSH is not None
        hidden_RLH = self.draft.fuse(self.own(fused_RSF, batch))
        drafts = self.unrolled(hidden_RLH, embeds_RSH, batch, recompute=self._config.recompute)
        hidden_PH = self.draft.head_input(drafts.hidden_PH)
        return self.compare(drafts._replace(hidden_PH=hidden_PH), batch, teacher_output)

    def drafts_behind(self, batch: Batch, given: TeacherOutput, places: Where, draw: Draw, embed: Any) -> Tensor:
        """As of `DraftsBehind`."""
        fused_RSF, embeds_RSH = given.fused_RSF, given.embeds_RSH
        assert fused_RSF is not None
        assert embeds_RSH is not None
        states, again = (self.draft.fuse(fused_RSF), embeds_RSH), self._config.recompute
        found = self.unrolled_behind(*states, batch, places, draw, embed, recompute=again)
        return self.projected(torch.stack(found, 1))

    def projected(self, hidden_XH: Tensor) -> Tensor:
        """Behind the norm."""
        return self.draft.head_input(hidden_XH)

    def teacher(self, given: TeacherOutput, at_P: Tensor) -> Teacher:
        """The target's distributions over its whole vocabulary, cut to the draft's."""
        (target,), states_NH = self._target, given.hidden_RSH.flatten(0, 1)
        return SharedTeacher.of(states_NH, target, at_P, cut=self.cut)


class Eagle3Objective(DrafterObjective):
    """Trains `draft` to have the distribution of the frozen `target` along its own drafts."""

    def __init__(self, recipe: TrainingRecipe, draft: Eagle3Net, target: PreTrainedModel, save: Save) -> None:
        goal, layers = Eagle3Student(draft, Projection.of(target), recipe), (*draft.config.layers, LAST)
        super().__init__(goal, draft, target, save, layers=layers, reads_tokens=True, ahead=recipe.eagle3.passes)


def build(run: Run, target: Backbone, rows: Prepared) -> Objective:
    """What a run trains: a fresh network, or the one that `model.start_from` names, with its draft vocabulary."""
    return begun(Eagle3Objective, student, run, target, rows)
