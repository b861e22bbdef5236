"""Train a DFlash 2 block drafter: DFlash's slots with convolutions along them, and a selector of candidates.

z-lab 2026. Beside the slots' own loss the selector has a cross-entropy over each slot's likeliest tokens, behind the
text's own token in front. Where the label is none of them it has none: no selector can draft that token, and one put
in its place would be a choice that decoding never meets. Published trainers differ here; `candidate_recall` says how
many labels are among the candidates.

Order of the file, as in every trainer: what it requires and what is trained, the run; the teacher's side is in
`common.py`, the slots' loss in `student.py`. Read next: `drafters/block/selected.py`, the selector.

Shapes: P drafts that count, C candidates, H hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ...data.rows.prepare import Prepared
from ...decoding.backbone.backbone import Backbone
from ...drafters.block.net import Layout
from ...drafters.block.selected import DFlash2Net
from ...errors import RequestError
from ..loop.loop import Outcome
from ..loop.objective import Batch
from ..losses.candidates import likeliest, logits_of
from ..sections import MakeProbe, Run, Sections
from ..student.warm_start import warm_started
from ..teacher.frozen import run_for_target, saver
from .common import BlockObjective, check_blocks, sizes_of
from .common import check_target as check_block_target
from .student import BlockStudent, Compared

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DFlash2Objective", "check_recipe", "check_target", "run", "student"]
LAYOUT: Layout = "fill-in"


def check_recipe(recipe: Sections) -> None:
    """Raise RequestError where nothing would be learnt."""
    check_blocks(recipe, recipe.block.layout or LAYOUT)


def check_target(recipe: Sections, target: PreTrainedModel) -> None:
    """As for all block drafters; also where the sizes do not fit the target's."""
    check_block_target(recipe, target)
    config: Any = target.config.get_text_config(decoder=True)
    table: Any = target.get_output_embeddings()
    if config.hidden_size % recipe.dflash2.group:
        raise RequestError(
            f"dflash2.group is {recipe.dflash2.group}, and the target's hidden size is {config.hidden_size}; expected "
            "a number that divides it"
        )
    if recipe.dflash2.candidates > len(table.weight):
        raise RequestError(
            f"dflash2.candidates is {recipe.dflash2.candidates}, and the target has {len(table.weight)} tokens; "
            "lower it"
        )


def student(recipe: Sections, target: PreTrainedModel) -> DFlash2Net:
    """An untrained network for `target`; on the meta device its shapes alone."""
    table: Any = target.get_output_embeddings()
    config = recipe.dflash2
    own = {"rank": config.rank, "candidates": config.candidates, "taps": config.taps, "group": config.group}
    sizes = sizes_of(recipe, target, LAYOUT)
    return DFlash2Net.for_target(target, **sizes, vocabulary=len(table.weight), **own)


class SelectingStudent(BlockStudent):
    """The slots' loss, and the selector's."""

    draft: DFlash2Net

    def __init__(self, draft: DFlash2Net, target: Any, recipe: Sections) -> None:
        super().__init__(draft, target, recipe)
        self._weight = recipe.dflash2.weight

    def beside(self, compared: Compared, batch: Batch) -> tuple[Tensor | float, dict[str, Tensor]]:
        """As in `BlockStudent`: the cross-entropy over candidates; reported of the first draft, and its recall."""
        (head,) = self._frozen
        guess_PH, label_P = compared.guess_PH, compared.label_P2[:, 0]
        best_PC = likeliest(guess_PH, head.projection, self.draft.config.candidates, head.chunk)
        said_PC = logits_of(guess_PH, head.projection, best_PC, head.chunk)
        before_P = batch["input_ids"].flatten()[compared.at_P]
        score_PC = said_PC + self.draft.candidate_selector(before_P, guess_PH, best_PC).float()
        is_label_PC = best_PC == label_P[:, None]
        found_P = is_label_PC.any(-1)
        ce_P = (score_PC.logsumexp(-1) - (score_PC * is_label_PC).sum(-1)) * found_P
        told_P = compared.told_first_P
        reported = {"selector": (ce_P.detach() * told_P).sum(), "candidate_recall": (found_P * told_P).sum()}
        return self._weight * (ce_P * compared.share_P).sum(), reported


class DFlash2Objective(BlockObjective):
    """Trains slots, the convolutions along them, and the selector behind them."""

    Student: ClassVar[type[BlockStudent]] = SelectingStudent


def run(recipe: Sections, out: Path, resume: str = "auto", make_probe: MakeProbe | None = None) -> Outcome:
    """Train a drafter into `out/drafter`, a fresh one or the one that `model.start_from` names."""
    check_recipe(recipe)

    def build(target: Backbone, _rows: Prepared) -> BlockObjective:
        net = student(recipe, target.model)
        return warm_started(DFlash2Objective(recipe, net, target.model, saver(target, "dflash2")), recipe, target)

    return run_for_target(build, Run(recipe, out, resume, make_probe), check_target=check_target)
