"""Train the throw-away family: the bigram network learns the text's own next token.

In the order of every trainer: what it requires and what is trained, the teacher's side, the loss,
the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bigram import BigramNet, BigramShape
from draftsmith.data.rows.prepare import Prepared
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.errors import RequestError
from draftsmith.trainers.labels import labelled
from draftsmith.trainers.loop.loop import Outcome
from draftsmith.trainers.loop.objective import Batch
from draftsmith.trainers.losses.chunked import ChunkedLoss, cross_entropy
from draftsmith.trainers.sections import MakeProbe, Run, Sections
from draftsmith.trainers.student.warm_start import warm_started
from draftsmith.trainers.teacher.features import FeatureSource, OnlineFeatures
from draftsmith.trainers.teacher.frozen import check_teacher, freeze, run_for_target, saver
from torch import Tensor, nn


def check_recipe(recipe: Sections) -> None:
    if recipe.bigram.inner % 2:
        raise RequestError(f"bigram.inner is {recipe.bigram.inner}; expected an even number")


def check_target(recipe: Sections, target: Any) -> None:
    check_teacher(recipe, target)


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


class BigramObjective:
    def __init__(self, recipe: Sections, net: BigramNet, target: Backbone) -> None:
        self.module: nn.Module = BigramStudent(net, recipe.objective.chunk)
        self._net, self._save = net, saver(target, "bigram")
        self.features: FeatureSource = OnlineFeatures(freeze(target.model))

    def prepare(self, _batch: Batch) -> None:
        """The text says it all."""

    def export(self, folder: Path) -> None:
        self._save(self._net, folder)

    def draft(self) -> nn.Module:
        return self._net


def run(recipe: Sections, out: Path, resume: str = "auto", make_probe: MakeProbe | None = None) -> Outcome:
    check_recipe(recipe)

    def build(target: Backbone, _rows: Prepared) -> BigramObjective:
        return warm_started(BigramObjective(recipe, student(recipe, target.model), target), recipe, target)

    return run_for_target(build, Run(recipe, out, resume, make_probe), check_target=check_target)
