"""Train a DFlash block drafter: states of the frozen target in, a block of drafts out of one pass.

Chen et al. 2026. Blocks begin at tokens drawn anew in every step; each sees the target's states below its
anchor and its own slots, as it will while drafting. Order of the file, as in every trainer: what it requires
and what is trained, how a run begins; the teacher's side is in `common.py`, the loss in `student.py`. Read next:
`common.py`; `anchors.py`, where blocks begin; `drafters/block/net.py`, the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...data.rows.prepare import Prepared
from ...decoding.backbone.backbone import Backbone
from ...drafters.block.net import BlockNet, Layout
from ..loop.objective import Objective
from ..recipe import Run, TrainingRecipe
from ..spine import begun
from .common import BlockObjective, check_blocks, check_target, sizes_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DFlashObjective", "build", "check_recipe", "check_target", "student"]
LAYOUT: Layout = "fill-in"
DFlashObjective = BlockObjective


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where nothing would be learnt."""
    check_blocks(recipe, recipe.block.layout or LAYOUT)


def student(recipe: TrainingRecipe, target: PreTrainedModel, ids: Sequence[int] | None = None) -> BlockNet:
    """An untrained network for `target`; on the meta device its shapes alone. `ids`: as of `drafted_ids`."""
    return BlockNet.for_target(target, **sizes_of(recipe, target, LAYOUT, ids))


def build(run: Run, target: Backbone, rows: Prepared) -> Objective:
    """What a run trains: a fresh network, or the one that `model.start_from` names."""
    return begun(BlockObjective, student, run, target, rows)
