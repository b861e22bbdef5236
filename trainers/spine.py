"""What every drafter of a frozen target is to its trainer: the run, and the objective.

A method's file is then its settings, its network and its loss, in one order: what it requires (`check_recipe`,
`check_target`), what is trained (`student`), the loss, the teacher's side (an objective), how a run begins (`build`).
Here is what they share: `run` and `check_target`, which the launcher calls for every method, and `DrafterObjective`,
the target's side and the drafter's folder. Read next: `eagle3.py`, a method from top to bottom;
`student/compared.py`, how drafts are compared; `loop/objective.py`, the hooks; `teacher/frozen.py`, the set-up of a
run.

Shapes: R rows, S tokens of a row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..data.rows.prepare import Prepared
from ..decoding.backbone.backbone import Backbone
from ..decoding.backbone.hidden_states import LAST
from ..drafters.layers.draft_vocabulary import ids_of
from ..drafters.layers.row_split import RowSplit
from .loop.loop import RunOutcome
from .loop.objective import Batch, Objective
from .loop.sharding import standalone
from .methods import METHODS
from .own_drafts.objective import check_reads_drafts, on_own_drafts
from .recipe import MakeProbe, Run, TrainingRecipe
from .student.fused import draft_vocabulary, frequent_tokens, say_covered
from .student.warm_start import warm_started
from .teacher.features import OnlineFeatures
from .teacher.frozen import Save, check_teacher, freeze, run_for_target, saver
from .teacher.output import OwnPositions, TeacherOutput, next_embeds
from .teacher.tuned import run_tuned

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# ---- the run ----------------------------------------------------------------------------------


def check_target(recipe: TrainingRecipe, target: PreTrainedModel) -> None:
    """Raise RequestError for a target that the recipe's method cannot learn from; its weights may be only shapes.

    What every method with a frozen target requires, then what its module adds by a `check_target` of its own.
    """
    method = METHODS[recipe.method]
    if method.has_target:
        check_teacher(recipe, target)
    if method.drafts_its_own:
        check_reads_drafts(recipe, target)
    if own := method.hook("check_target"):
        own(recipe, target)


def run(recipe: TrainingRecipe, out: Path, resume: str = "auto", make_probe: MakeProbe | None = None) -> RunOutcome:
    """Train by a recipe into `out`: what its method's `build` makes, or by a `run` of the method's own.

    A drafter goes into `out/drafter`, a target that is tuned beneath it, which alone it fits, into `out/target`. It
    is fresh, or the one that `model.start_from` names.
    """
    method = METHODS[recipe.method]
    if own := method.hook("run"):
        outcome: RunOutcome = own(recipe, out, resume, make_probe)
        return outcome
    code, given = method.code(), Run(recipe, out, resume, make_probe)
    code.check_recipe(recipe)
    if check_start := method.hook("check_start"):
        check_start(recipe)
    if recipe.tunes_target:
        build = partial(code.build_tuned, given)
        return run_tuned(build, given, check_target=check_target, remember=code.remembers(recipe))
    check_rows = method.hook("check_rows")
    return run_for_target(partial(code.build, given), given, check_target=check_target, check_rows=check_rows)


def begun(
    kind: Callable[[TrainingRecipe, Any, PreTrainedModel, Save], Objective],
    make: Callable[[TrainingRecipe, PreTrainedModel, Sequence[int] | None], Any],
    run: Run,
    target: Backbone,
    rows: Prepared,
) -> Objective:
    """The objective of a run: what `make` makes, over the recipe's draft vocabulary if it has one, with the weights
    that `model.start_from` names, written as its own family."""
    recipe = run.recipe
    draft = warm_started(make(recipe, target.model, most_frequent(recipe, target, rows)), recipe, target)
    ids_U = ids_of(draft)
    if ids_U is not None:
        say_covered(rows.train, ids_U.tolist())
    return on_own_drafts(kind(recipe, draft, target.model, saver(target, draft.family)), target.model, recipe)


def most_frequent(recipe: TrainingRecipe, target: Backbone, rows: Prepared) -> Sequence[int] | None:
    """The recipe's draft vocabulary: the most frequent labels of its training rows, ascending; None: it has none."""
    size, _ = draft_vocabulary(recipe)
    return None if size is None else frequent_tokens(rows.train, min(size, target.vocabulary))


# ---- the objective ----------------------------------------------------------------------------


class DrafterObjective(Objective):
    """Trains a drafter on the states of a frozen target, and writes the drafter's folder.

    A method adds its student; `prepare` and the hooks of its own where it needs others than these.
    """

    def __init__(
        self,
        student: nn.Module,
        draft: nn.Module,
        target: PreTrainedModel,
        save: Save,
        *,
        layers: Sequence[int] = (LAST,),
        reads_tokens: bool = False,
        ahead: int | None = None,
    ) -> None:
        """What is learnt from what.

        Args:
            student: the drafter and its loss.
            draft: the drafter, which is in it.
            layers: the hidden states of the target that are read, the last one behind the others.
            reads_tokens: whether the embeddings of the tokens behind the states are read too.
            ahead: where rows may be cut, how far behind its part a process needs the target's states.
        """
        super().__init__(student, features=OnlineFeatures(freeze(target), layers))
        self._draft, self._target, self._save = draft, target, save
        self._reads_tokens, self._ahead = reads_tokens, ahead

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Any:
        """The target's last hidden states, those of other layers side by side, and the embeddings of the tokens behind
        them, where they are read."""
        *others, hidden_RSH = self.features(batch)
        embeds_RSH = next_embeds(self._target, batch, self.features.part) if self._reads_tokens else None
        fused_RSF = torch.cat(others, -1) if len(others) > 1 else next(iter(others), None)
        return TeacherOutput(hidden_RSH, embeds_RSH, fused_RSF)

    def split_rows(self, split: RowSplit) -> None:
        """Learn from a part of every row; what the target gives goes on behind it for the later passes."""
        if self._ahead is None:
            super().split_rows(split)
            return
        self.module.split = split  # type: ignore[assignment]
        self.features.part = OwnPositions(split, self._ahead)

    def export(self, folder: Path) -> None:
        """Write a drafter folder."""
        self._save(standalone(self._draft), folder)

    def draft(self) -> nn.Module:
        """The drafter."""
        return self._draft
