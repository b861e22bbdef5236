"""Distil an independent draft model from a frozen target, the target run in the same process.

Sources: Hinton et al. 2015; DistillSpec (Zhou et al. 2023) for the forward KL on drafts, and which
divergence suits which task. Order of the file, as in every trainer: what it requires and what is
trained (its loss is `student/distillation.py`), the teacher's side, how a run begins. Read next:
`student/draft.py`, the draft; `losses/chunked.py` and `losses/divergences.py`, the mathematics.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..data.rows.prepare import Prepared
from ..decoding.backbone.backbone import Backbone
from ..drafters.layers.draft_vocabulary import hold
from ..errors import RequestError
from .loop.objective import Batch
from .losses.chunked import Teacher
from .losses.terms import check_terms
from .packed.lengths import check_start_context
from .packed.passes import check_compiled_rows
from .pruning.sizes import check_cut
from .recipe import Run, TrainingRecipe
from .spine import DrafterObjective, most_frequent
from .student.distillation import DraftStudent, check_compiled_mix, teacher_of
from .student.draft import cut_from_target, make_draft, save_draft
from .student.fused import say_covered
from .student.lora import check_adapter
from .teacher.frozen import Save
from .teacher.rollouts import Rollouts, check_rollout_prompts, check_rollout_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where nothing would be learnt, an adapter has no base, rollouts have no room, or shapes or
    the mix do not stay for `loop.compile`."""
    length = recipe.objective.draft_length
    check_terms(recipe.objective, positions=length, counted_by="objective.draft_length")
    check_compiled_rows(recipe.loop, recipe.data.sequence_length)
    check_compiled_mix(recipe.loop, recipe.objective)
    check_adapter(recipe.lora, recipe.model, recipe.method)
    _check_drafted(recipe)
    check_rollout_rows(recipe.rollouts, recipe.data.sequence_length, recipe.loop.batch_rows)
    _check_written(recipe)


def _check_written(recipe: TrainingRecipe) -> None:
    """Raise RequestError where weights are for the target's own words and rows are to be written by the draft."""
    if recipe.objective.positions == "on-policy" and recipe.rollouts.share and recipe.rollouts.by != "target":
        raise RequestError(
            f"objective.positions is on-policy, which is for rows in the target's own words, and rollouts.by is "
            f"{recipe.rollouts.by}: leave one of them out. Along the target's words at temperature 1 the draft has "
            "nothing to write"
        )


def _check_drafted(recipe: TrainingRecipe) -> None:
    """Raise RequestError where an adapter would be trained for fewer tokens than its base drafts."""
    if recipe.model.vocabulary is not None and recipe.lora.rank is not None:
        raise RequestError(
            f"model.vocabulary is {recipe.model.vocabulary} and lora.rank {recipe.lora.rank}: an adapter changes "
            "layers and no projection; leave one of them out. A draft that exists drafts fewer tokens by "
            "--drafter.draft_vocabulary"
        )


def check_target(recipe: TrainingRecipe, target: PreTrainedModel) -> None:
    """Raise RequestError for sizes of no cut."""
    check_cut(recipe.model, target)


def check_start(recipe: TrainingRecipe) -> None:
    """Raise RequestError for rows that are too long for the model of `start_from`; reads no weights."""
    check_start_context(recipe.model, recipe.row_tokens)


def check_rows(recipe: TrainingRecipe, rows: Prepared) -> None:
    """Raise RequestError where the models are to write rows anew and no row holds a prompt."""
    check_rollout_prompts(recipe.rollouts, rows.train)


def student(
    recipe: TrainingRecipe,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    pruned: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """The draft, with a fresh adapter if the recipe asks for one; on the meta device its shapes alone.

    Arguments and errors are those of `make_draft`.
    """
    return make_draft(recipe, recipe.model, recipe.lora, target, tokenizer, pruned=pruned)


class DistillObjective(DrafterObjective):
    """Trains `draft` to have the distribution of the frozen `target`."""

    def __init__(self, recipe: TrainingRecipe, draft: PreTrainedModel, target: PreTrainedModel, save: Save) -> None:
        self._student = DraftStudent(draft, target, recipe.objective)
        super().__init__(self._student, draft, target, save)
        if recipe.rollouts.share:
            self.rollouts = Rollouts(recipe.rollouts, draft, target)
            self.features.looks_ahead = False  # at rows that will be others

    def set_steps(self, steps: int) -> None:
        """How many steps the run has: the mix moves over a share of them."""
        self._student.set_steps(steps)

    def begin_step(self, step: int, _seed: int) -> None:
        """Minimise that step's mix."""
        self._student.begin_step(step)

    def prepare(self, batch: Batch) -> Teacher:
        """The target's last hidden states at the labelled positions."""
        return teacher_of(self._target, super().prepare(batch).hidden_RSH, batch, self._student.cut)


def build(run: Run, target: Backbone, rows: Prepared) -> DistillObjective:
    """What a run trains: a draft from scratch, given, or cut from the target."""
    recipe = run.recipe
    pruned = cut_from_target(recipe, recipe.model, target.model, rows.validation, out=run.out, seed=recipe.loop.seed)
    draft = student(recipe, target.model, target.tokenizer, pruned=pruned)
    ids = most_frequent(recipe, target, rows)
    if ids is not None:
        hold(draft, len(ids), ids, saved=False)
        say_covered(rows.train, ids)
    return DistillObjective(recipe, draft, target.model, partial(save_draft, target=target, lora=recipe.lora))
