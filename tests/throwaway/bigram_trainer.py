"""Train the throw-away family: the bigram network learns the text's own next token.

In the order of every trainer: what it requires and what is trained, the teacher's side, the loss,
how a run begins.
"""

from __future__ import annotations

from typing import Any

from bigram import BigramNet, BigramShape
from draftsmith.data.rows.prepare import Prepared
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.errors import RequestError
from draftsmith.trainers.labels import labelled
from draftsmith.trainers.loop.objective import Batch
from draftsmith.trainers.losses.chunked import ChunkedLoss, cross_entropy
from draftsmith.trainers.sections import Run, Sections
from draftsmith.trainers.spine import DrafterObjective, begun
from draftsmith.trainers.teacher.frozen import Save
from torch import Tensor, nn


def check_recipe(recipe: Sections) -> None:
    if recipe.bigram.inner % 2:
        raise RequestError(f"bigram.inner is {recipe.bigram.inner}; expected an even number")


def student(recipe: Sections, target: Any) -> BigramNet:
    rows = len(target.get_output_embeddings().weight)
    return BigramNet(BigramShape(rows, recipe.bigram.inner))


class BigramStudent(nn.Module):
    def __init__(self, net: BigramNet, chunk: int) -> None:
        super().__init__()
        self.net = net
        self.head = ChunkedLoss(net.outer, cross_entropy, chunk=chunk)

    def forward(self, batch: Batch, _teacher_output: None) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_PH, label_P = labelled(self.net.inner(batch["input_ids"]), batch)
        return self.head(hidden_PH, label_P)


class BigramObjective(DrafterObjective):
    def __init__(self, recipe: Sections, net: BigramNet, target: Any, save: Save) -> None:
        super().__init__(BigramStudent(net, recipe.objective.chunk), net, target, save)

    def prepare(self, _batch: Batch) -> None:
        """The text says it all."""


def build(run: Run, target: Backbone, _rows: Prepared) -> BigramObjective:
    return begun(BigramObjective, run.recipe, student(run.recipe, target.model), target)
