"""Train Hydra heads: as Medusa's, on the true tokens in front of the one that each speaks of.

Ankner et al. 2024, arXiv 2402.05109. Hydra is `objective: {kl: 0, ce: 1}` with `medusa.decay` 1;
Hydra++ adds three things: `medusa.prefix`, a layer in front of the heads, `medusa.layers` 4, and
the teacher loss `objective: {kl: 1, ce: 0}`. Order of the file, as in every trainer: what it
requires and what is trained, the loss, the teacher's side, how a run begins. Read next:
`drafters/heads/hydra.py`, the heads and the layer; `heads.py`, losses.

Shapes: R rows, S tokens of a row, H hidden size, F numbers that a head reads, X positions that
have a token so far ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.rows.prepare import Prepared
from ..decoding.backbone.backbone import Backbone
from ..drafters.heads.hydra import HydraHeads, reads
from ..errors import RequestError
from .heads import HeadsStudent
from .loop.objective import Batch, Objective
from .losses.terms import check_terms
from .own_drafts.places import check_own_drafts
from .pruning.sizes import check_not_pruned
from .recipe import Run, TrainingRecipe
from .spine import DrafterObjective, begun
from .student.drafted import Draw, Where
from .student.fused import drafted_ids
from .teacher.frozen import Save
from .teacher.output import TeacherOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where nothing would be learnt."""
    check_terms(recipe.objective, positions=recipe.medusa.heads, counted_by="medusa.heads")
    if recipe.medusa.as_published and recipe.medusa.shared_head:
        raise RequestError(
            "medusa.as_published is on, whose heads have projections of their own with biases, beside "
            "medusa.shared_head; leave one of them out"
        )
    check_not_pruned(recipe.model)
    check_own_drafts(recipe)


def student(recipe: TrainingRecipe, target: PreTrainedModel, ids: Sequence[int] | None = None) -> HydraHeads:
    """Untrained heads for `target`; on the meta device their shapes alone. `ids`: as of `drafted_ids`."""
    medusa = recipe.medusa
    return HydraHeads.for_target(
        target,
        heads=medusa.heads,
        layers=medusa.layers,
        shared_head=medusa.shared_head,
        prefix=medusa.prefix,
        as_published=medusa.as_published,
        ids=drafted_ids(medusa.vocabulary, target, ids),
    )


class HydraStudent(HeadsStudent):
    """sum_k decay^k loss_k; head k reads tokens t+1 to t+k too, and the prefix layer's output if there is one.

    The layer runs once per batch, over whole rows, inside each document.
    """

    def __init__(self, heads: HydraHeads, target: PreTrainedModel, recipe: TrainingRecipe) -> None:
        super().__init__(heads, target, recipe.objective, recompute=recipe.medusa.recompute)
        self._decay = recipe.medusa.decay

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_RSH, embeds_RSH = teacher_output.hidden_RSH, teacher_output.embeds_RSH
        assert embeds_RSH is not None  # `HydraObjective` asks for them
        read_RSH = self._read(batch, hidden_RSH)
        return self.decayed(batch, hidden_RSH, lambda k: head_input(k, read_RSH, embeds_RSH), self._decay)

    def drafts_behind(self, batch: Batch, given: TeacherOutput, places: Where, draw: Draw, embed: Any) -> Any:
        """As of `DraftsBehind`: each head reads the tokens that those in front of it have drafted."""
        read_XH = self._read(batch, given.hidden_RSH)[places.row_X, places.at_X].to(self.medusa.dtype)
        token_X, embeds, found = batch["input_ids"][places.row_X, places.at_X + 1], [], []
        for k in range(1, self.drafts_made + 1):
            embeds.append(embed(token_X))
            found.append(reads(read_XH, embeds))
            with torch.no_grad():
                token_X = draw(self.medusa.head(k, found[-1]))
        return found

    def _read(self, batch: Batch, hidden_RSH: Tensor) -> Tensor:
        """The states that heads read: the target's, or what the prefix layer makes of them."""
        heads: Any = self.medusa
        if heads.prefix is None:
            return hidden_RSH
        read_RSH: Tensor = heads.prefix(
            hidden_RSH.to(heads.dtype), batch["positions"], documents_BN=batch["documents"]
        )
        return read_RSH


def head_input(k: int, read_RSH: Tensor, embeds_RSH: Tensor) -> Tensor:
    """h_t and the embeddings of the k tokens behind t, for every t that has a token k + 1 ahead, [R, X, F].

    `embeds_RSH` holds at t that of token t + 1.
    """
    X = embeds_RSH.shape[1] - (k + 1)
    if X <= 0:  # rows too short for this head
        return reads(read_RSH[:, :0], [embeds_RSH[:, :0]] * k)
    return reads(read_RSH[:, :X], [embeds_RSH[:, i : i + X] for i in range(k)])


class HydraObjective(DrafterObjective):
    """Trains `heads` to predict what the frozen `target` will say, the text so far being known."""

    def __init__(self, recipe: TrainingRecipe, heads: HydraHeads, target: PreTrainedModel, save: Save) -> None:
        super().__init__(HydraStudent(heads, target, recipe), heads, target, save, reads_tokens=True)


def build(run: Run, target: Backbone, rows: Prepared) -> Objective:
    """What a run trains: fresh heads, or those that `model.start_from` names."""
    return begun(HydraObjective, student, run, target, rows)
