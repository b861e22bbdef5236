"""Train a DFlash 2 block drafter: DFlash's slots with convolutions along them, and a selector of candidates.

z-lab 2026. Beside the slots' own loss the selector has a cross-entropy over each slot's likeliest tokens, behind the
text's own token in front. Where the label is none of them it has none: no selector can draft that token, and one put
in its place would be a choice that decoding never meets. Published trainers differ here; `candidate_recall` says how
many labels are among the candidates.

Order of the file, as in every trainer: what it requires and what is trained, how a run begins; the teacher's side is
in `common.py`, the slots' loss in `student.py`. Read next: `drafters/block/selected.py`, the selector.

Shapes: P drafts that count, C candidates, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...data.rows.prepare import Prepared
from ...decoding.backbone.backbone import Backbone
from ...drafters.block.net import Layout
from ...drafters.block.selected import DFlash2Net
from ...errors import RequestError
from ..loop.objective import Batch, Objective
from ..losses.candidates import likeliest, logits_of
from ..own_drafts.places import learns_length
from ..recipe import Run, TrainingRecipe
from ..spine import begun
from ..student.compared import Drafts
from .common import BlockObjective, check_blocks, sizes_of
from .common import check_target as check_block_target
from .student import BlockStudent, BlockTeacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DFlash2Objective", "build", "check_recipe", "check_target", "student"]
LAYOUT: Layout = "fill-in"


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where nothing would be learnt."""
    check_blocks(recipe, recipe.block.layout or LAYOUT)
    if recipe.rollouts.share and learns_length(recipe):
        raise RequestError(
            "rollouts.share is above 0, and objective.tv with objective.positions accepted or on-policy learns how "
            "likely each drawn token is kept, which the selector would have for its label: set objective.positions to "
            "geometric"
        )


def check_target(recipe: TrainingRecipe, target: PreTrainedModel) -> None:
    """As for all block drafters; also where the sizes do not fit the target's."""
    check_block_target(recipe, target)
    config: Any = target.config.get_text_config(decoder=True)
    table: Any = target.get_output_embeddings()
    if config.hidden_size % recipe.dflash2.group:
        raise RequestError(
            f"dflash2.group is {recipe.dflash2.group}, and the target's hidden size is {config.hidden_size}; expected "
            "a number that divides it"
        )
    most, size = len(table.weight), recipe.block.vocabulary
    if recipe.dflash2.candidates > min(most, size or most):
        of = f"the target has {most} tokens" if size is None or size > most else f"block.vocabulary is {size}"
        raise RequestError(f"dflash2.candidates is {recipe.dflash2.candidates}, and {of}; lower it")


def student(recipe: TrainingRecipe, target: PreTrainedModel, ids: Sequence[int] | None = None) -> DFlash2Net:
    """An untrained network for `target`; on the meta device its shapes alone. `ids`: as of `drafted_ids`."""
    table: Any = target.get_output_embeddings()
    own: dict[str, Any] = {
        "rank": recipe.dflash2.rank,
        "candidates": recipe.dflash2.candidates,
        "taps": recipe.dflash2.taps,
        "group": recipe.dflash2.group,
    }
    sizes = sizes_of(recipe, target, LAYOUT, ids)
    return DFlash2Net.for_target(target, **sizes, vocabulary=len(table.weight), **own)


class SelectingStudent(BlockStudent):
    """The slots' loss, and the selector's."""

    draft: DFlash2Net

    def __init__(self, draft: DFlash2Net, target: Any, recipe: TrainingRecipe) -> None:
        super().__init__(draft, target, recipe)
        self._weight = recipe.dflash2.weight

    def draft_logits(self, hidden_CH: Tensor, before_C: Tensor, j: int) -> Tensor:
        """As of `DraftsBehind`: what the selector says of the likeliest, and no other token."""
        logits_CU = super().draft_logits(hidden_CH, before_C, j)
        best = logits_CU.topk(self.draft.config.candidates)
        score_CC = best.values + self.draft.candidate_selector(before_C, hidden_CH, best.indices).float()
        return torch.full_like(logits_CU, -torch.inf).scatter(-1, best.indices, score_CC)

    def auxiliary_loss(
        self, drafts: Drafts, batch: Batch, _given: BlockTeacher
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        """The cross-entropy over candidates; reported of the first draft, and its recall."""
        head, hidden_PH, label_P = self.judge, drafts.hidden_PH, drafts.label_P2[:, 0]
        best_PC = likeliest(hidden_PH, head.projection, self.draft.config.candidates, head.chunk)
        logits_PC = logits_of(hidden_PH, head.projection, best_PC, head.chunk)
        before_P = batch["input_ids"].flatten()[drafts.at_P]
        score_PC = logits_PC + self.draft.candidate_selector(before_P, hidden_PH, best_PC).float()
        is_label_PC = best_PC == label_P[:, None]
        found_P = is_label_PC.any(-1)
        ce_P = (score_PC.logsumexp(-1) - (score_PC * is_label_PC).sum(-1)) * found_P
        weight_P, counted_P = drafts.first_weight_P, drafts.counted_P
        assert counted_P is not None  # `BlockStudent.weights` has made it
        reported = {"selector": (ce_P.detach() * weight_P).sum(), "candidate_recall": (found_P * weight_P).sum()}
        return self._weight * (ce_P * counted_P).sum(), reported


class DFlash2Objective(BlockObjective):
    """Trains slots, the convolutions along them, and the selector behind them."""

    Student: ClassVar[type[BlockStudent]] = SelectingStudent


def build(run: Run, target: Backbone, rows: Prepared) -> Objective:
    """What a run trains: a fresh network, or the one that `model.start_from` names."""
    return begun(DFlash2Objective, student, run, target, rows)
