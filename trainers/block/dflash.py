"""Train a DFlash block drafter: states of the frozen target in, a block of drafts out of one pass.

Chen et al. 2026. Blocks begin at tokens drawn anew in every step; each sees the target's states below its
anchor and its own slots, as it will while drafting. Order of the file, as in every trainer: what it requires
and what is trained, the run; the teacher's side is in `common.py`, the loss in `student.py`. Read next:
`common.py`; `anchors.py`, where blocks begin; `drafters/block/net.py`, the network.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...data.rows.prepare import Prepared
from ...decoding.backbone.backbone import Backbone
from ...drafters.block.net import BlockNet, Layout
from ..loop.loop import Outcome
from ..sections import MakeProbe, Run, Sections
from ..student.warm_start import warm_started
from ..teacher.frozen import run_for_target, saver
from .common import BlockObjective, check_blocks, check_target, sizes_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DFlashObjective", "check_recipe", "check_target", "run", "student"]
LAYOUT: Layout = "fill-in"
DFlashObjective = BlockObjective


def check_recipe(recipe: Sections) -> None:
    """Raise RequestError where nothing would be learnt."""
    check_blocks(recipe, recipe.block.layout or LAYOUT)


def student(recipe: Sections, target: PreTrainedModel) -> BlockNet:
    """An untrained network for `target`; on the meta device its shapes alone."""
    return BlockNet.for_target(target, **sizes_of(recipe, target, LAYOUT))


def run(recipe: Sections, out: Path, resume: str = "auto", make_probe: MakeProbe | None = None) -> Outcome:
    """Train a drafter into `out/drafter`, a fresh one or the one that `model.start_from` names."""
    check_recipe(recipe)

    def build(target: Backbone, _rows: Prepared) -> BlockObjective:
        net = student(recipe, target.model)
        return warm_started(BlockObjective(recipe, net, target.model, saver(target, "dflash")), recipe, target)

    return run_for_target(build, Run(recipe, out, resume, make_probe), check_target=check_target)
