"""Train Hydra heads: as Medusa's, on the true tokens in front of the one that each speaks of.

Ankner et al. 2024, arXiv 2402.05109. Hydra is `objective: {kl: 0, ce: 1}` with `medusa.decay` 1;
Hydra++ adds three things: `medusa.prefix`, a layer in front of the heads, `medusa.layers` 4, and
the teacher loss `objective: {kl: 1, ce: 0}`. Order of the file, as in every trainer: what it
requires and what is trained, the loss, the teacher's side, the run. Read next:
`drafters/heads/hydra.py`, the heads; `drafters/heads/hydra.py`, the layer; `heads.py`, losses.

Shapes: R rows, S tokens of a row, H hidden size, F numbers that a head reads, X positions that
have a token so far ahead.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.rows.prepare import Prepared
from ..decoding.backbone.backbone import Backbone
from ..drafters.heads.hydra import Hydra, HydraHeads, HydraPlus, reads
from .heads import HeadsStudent
from .loop.loop import Outcome
from .loop.objective import Batch
from .loop.sharding import standalone
from .losses.terms import check_terms
from .pruning.sizes import check_not_pruned
from .sections import MakeProbe, Run, Sections
from .student.warm_start import warm_started
from .teacher.features import FeatureSource, OnlineFeatures
from .teacher.frozen import Save, check_teacher, freeze, run_for_target, saver
from .teacher.output import TeacherOutput, next_embeds

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: Sections) -> None:
    """Raise RequestError where nothing would be learnt."""
    check_terms(recipe.objective, positions=recipe.medusa.heads, counted_by="medusa.heads")
    check_not_pruned(recipe.model)


def check_target(recipe: Sections, target: PreTrainedModel) -> None:
    """Raise RequestError for logits that training cannot make, or rows beyond the context."""
    check_teacher(recipe, target)


def student(recipe: Sections, target: PreTrainedModel) -> HydraHeads:
    """Untrained heads for `target`; on the meta device their shapes alone."""
    medusa = recipe.medusa
    return HydraHeads.for_target(
        target, heads=medusa.heads, layers=medusa.layers, shared_head=medusa.shared_head, prefix=medusa.prefix
    )


class HydraStudent(HeadsStudent):
    """sum_k decay^k loss_k; head k reads tokens t+1 to t+k too, and the prefix layer's output if there is one.

    The layer runs once per batch, over whole rows, inside each document.
    """

    def __init__(self, heads: HydraHeads, target: PreTrainedModel, recipe: Sections) -> None:
        super().__init__(heads, target, recipe.objective, recompute=recipe.medusa.recompute)
        self._decay = recipe.medusa.decay

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        heads: Any = self.medusa
        hidden_RSH, embeds_RSH = teacher_output.hidden_RSH, teacher_output.embeds_RSH
        assert embeds_RSH is not None  # `HydraObjective.prepare` makes them
        read_RSH = hidden_RSH
        if heads.prefix is not None:
            read_RSH = heads.prefix(hidden_RSH.to(heads.dtype), batch["positions"], documents_BN=batch["documents"])
        return self.decayed(batch, hidden_RSH, lambda k: head_input(k, read_RSH, embeds_RSH), self._decay)


def head_input(k: int, read_RSH: Tensor, embeds_RSH: Tensor) -> Tensor:
    """h_t and the embeddings of the k tokens behind t, for every t that has a token k + 1 ahead, [R, X, F].

    `embeds_RSH` holds at t that of token t + 1.
    """
    X = embeds_RSH.shape[1] - (k + 1)
    if X <= 0:  # rows too short for this head
        return reads(read_RSH[:, :0], [embeds_RSH[:, :0]] * k)
    return reads(read_RSH[:, :X], [embeds_RSH[:, i : i + X] for i in range(k)])


class HydraObjective:
    """Trains `heads` to predict what the frozen `target` will say, the text so far being known."""

    def __init__(self, recipe: Sections, heads: HydraHeads, target: PreTrainedModel, save: Save) -> None:
        self.module: nn.Module = HydraStudent(heads, freeze(target), recipe)
        self.features: FeatureSource = OnlineFeatures(target)
        self._heads, self._target, self._save = heads, target, save

    @torch.no_grad()
    def prepare(self, batch: Batch) -> TeacherOutput:
        """The target's last hidden states and its embeddings of the tokens."""
        (hidden_RSH,) = self.features(batch)
        return TeacherOutput(hidden_RSH, next_embeds(self._target, batch))

    def export(self, folder: Path) -> None:
        """Write a drafter folder."""
        self._save(standalone(self._heads), folder)

    def draft(self) -> nn.Module:
        return self._heads


def run(recipe: Sections, out: Path, resume: str = "auto", make_probe: MakeProbe | None = None) -> Outcome:
    """Train heads into `out/drafter`, fresh ones or those that `model.start_from` names."""
    check_recipe(recipe)
    family = (HydraPlus if recipe.medusa.prefix else Hydra).family

    def build(target: Backbone, _rows: Prepared) -> HydraObjective:
        objective = HydraObjective(recipe, student(recipe, target.model), target.model, saver(target, family))
        return warm_started(objective, recipe, target)

    return run_for_target(build, Run(recipe, out, resume, make_probe), check_target=check_target)
