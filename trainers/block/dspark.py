"""Train a DSpark block drafter: DFlash's slots, and a head of low rank that sees the token in front of a draft.

DeepSeek-AI 2026. In training that token is the text's own, as a draft that is tested behind accepted ones is. Order of
the file, as in every trainer: what it requires and what is trained, how a run begins; the teacher's side is in
`common.py`, the slots' loss in `student.py`. Read next: `common.py`; `drafters/block/dspark.py`, the head.

Shapes: P drafts that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from ...data.rows.prepare import Prepared
from ...decoding.backbone.backbone import Backbone
from ...drafters.block.dspark import DSparkNet
from ...drafters.block.net import Layout
from ..loop.objective import Batch, Objective
from ..recipe import Run, TrainingRecipe
from ..spine import begun
from ..student.compared import Drafts
from .common import BlockObjective, check_blocks, check_target, sizes_of
from .student import BlockStudent, BlockTeacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DSparkObjective", "build", "check_recipe", "check_target", "student"]
LAYOUT: Layout = "anchor-first"


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where nothing would be learnt."""
    check_blocks(recipe, recipe.block.layout or LAYOUT)


def student(recipe: TrainingRecipe, target: PreTrainedModel, ids: Sequence[int] | None = None) -> DSparkNet:
    """An untrained network for `target`; on the meta device its shapes alone. `ids`: as of `drafted_ids`."""
    table: Any = target.get_output_embeddings()
    sizes = sizes_of(recipe, target, LAYOUT, ids)
    head: dict[str, Any] = {"rank": recipe.dspark.rank, "confidence": recipe.dspark.confidence > 0}
    return DSparkNet.for_target(target, **sizes, vocabulary=len(table.weight), **head)


class DSparkStudent(BlockStudent):
    """The slots' loss with the head behind them, and that of how sure it is of each."""

    draft: DSparkNet

    def __init__(self, draft: DSparkNet, target: Any, recipe: TrainingRecipe) -> None:
        super().__init__(draft, target, recipe, keeps_overlap=recipe.dspark.confidence > 0)
        self._weight = recipe.dspark.confidence

    def auxiliary_loss(
        self, drafts: Drafts, batch: Batch, _given: BlockTeacher
    ) -> tuple[Tensor | float, dict[str, Tensor]] | None:
        """The cross-entropy of each draft's confidence against the share that is accepted."""
        if drafts.overlap_P is None:
            return None
        logit_P = self.draft.confidence(drafts.hidden_PH, batch["input_ids"].flatten()[drafts.at_P])
        assert logit_P is not None  # its weight is above 0
        counted_P = drafts.counted_P
        assert counted_P is not None  # `BlockStudent.weights` has made it
        bce_P = F.binary_cross_entropy_with_logits(logit_P, drafts.overlap_P.clamp(0, 1), reduction="none")
        reported = {"confidence": (bce_P.detach() * drafts.first_weight_P).sum()}
        return self._weight * (bce_P * counted_P).sum(), reported


class DSparkObjective(BlockObjective):
    """Trains slots, the head behind them, and how sure it is of each."""

    Student: ClassVar[type[BlockStudent]] = DSparkStudent


def build(run: Run, target: Backbone, rows: Prepared) -> Objective:
    """What a run trains: a fresh network, or the one that `model.start_from` names."""
    return begun(DSparkObjective, student, run, target, rows)
