"""All SSMs of an ensemble in the same steps: each learns what those before it miss right now.

In every batch SSM k's labels are weighed by what SSMs 1 to k - 1 cover at that moment, as
`boost.py` weighs them between rounds; no gradient flows through the weights. They are not scaled to
a mean of 1, which would tie a process to the batches of the others. Read next: `coverage.py`.

Shapes: R samples, S tokens of a sample, P labelled positions, H hidden size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...decoding.target.backbone import Backbone
from ...drafters.folder import save_draft_model
from ...drafters.model.ensemble import save_ensemble
from .. import distill
from ..config import BoostConfig, ModelConfig, ObjectiveConfig
from ..distill import DistillObjective, DraftStudent
from ..loop.objective import Batch, Stepwise, hidden_states, labelled
from ..losses.chunked import Teacher
from ..teacher.features import FeatureSource
from .coverage import acceptance, matched, weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Together(nn.Module):
    """Several students of one teacher, and the sum of their weighted losses."""

    def __init__(self, students: Sequence[DraftStudent], config: BoostConfig) -> None:
        super().__init__()
        self.students = nn.ModuleList(students)
        self.config = config

    def forward(self, batch: Batch, teacher: Teacher) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum over SSMs, and each one's terms with its number behind their names.

        `weight_k` is how much a label counts for SSM k, `covered_k` whether it covers the unit.
        """
        label_RS = batch["loss_mask"]
        accepted: list[Tensor] = []
        losses: list[Tensor] = []
        reported: dict[str, Tensor] = {}
        for number, each in enumerate(self.students, 1):
            student = cast(DraftStudent, each)
            weight_RS = weights(accepted, label_RS, self.config)
            hidden_PH, label_P = labelled(hidden_states(student.draft, batch), batch)
            loss, terms = student.head(hidden_PH, label_P, teacher, _labels(weight_RS, label_RS))
            losses.append(loss)
            accepted.append(self._accepted(student, hidden_PH, label_P, label_RS))
            terms = {**terms, "weight": weight_RS.sum(), "covered": (accepted[-1] == 1).sum()}
            reported |= {f"{name}_{number}": term for name, term in terms.items()}
        total = torch.stack(losses).sum()
        return total, {"loss": total.detach(), **reported}

    @torch.no_grad()
    def _accepted(self, student: DraftStudent, hidden_PH: Tensor, label_P: Tensor, label_RS: Tensor) -> Tensor:
        head = student.head
        found_RS = torch.zeros_like(label_RS)
        found_RS[:, 1:][label_RS[:, 1:]] = matched(hidden_PH, head.weight[: head.rows], label_P, head.chunk)
        return acceptance(found_RS, label_RS, self.config)


class SideBySide:
    """Trains the SSMs of an ensemble together."""

    def __init__(self, goals: Sequence[DistillObjective], target: Backbone, config: BoostConfig) -> None:
        self._goals, self._target = list(goals), target
        self.module: nn.Module = Together([cast(DraftStudent, g.module) for g in goals], config)

    @property
    def features(self) -> FeatureSource:
        """One source: the teacher output is the same for all."""
        return self._goals[0].features

    @features.setter
    def features(self, source: FeatureSource) -> None:
        self._goals[0].features = source

    def set_steps(self, steps: int) -> None:
        """How long the run is, for mixes that move."""
        for goal in self._goals:
            goal.set_steps(steps)

    def begin_step(self, step: int, seed: int) -> None:
        """As each SSM's own objective would, where it is not the same at every step."""
        for goal in self._goals:
            if isinstance(goal, Stepwise):
                goal.begin_step(step, seed)

    def prepare(self, batch: Batch) -> Any:
        """What the target says, once for all."""
        return self._goals[0].prepare(batch)

    def drafts(self) -> list[nn.Module]:
        """The SSMs in their order."""
        return [goal.draft() for goal in self._goals]

    def draft(self) -> nn.Module:
        """All SSMs, as they decode: an ensemble."""
        return nn.ModuleList(self.drafts())

    def export(self, folder: Path) -> None:
        """An ensemble of ordinary draft models."""
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            members = [Path(place) / str(number) for number in range(len(self._goals))]
            for member, draft in zip(members, self.drafts(), strict=True):
                save_draft_model(draft, member, self._target)
            save_ensemble(folder, members, self._target)


def build(
    models: Sequence[tuple[ModelConfig, int]], objective: ObjectiveConfig, boost: BoostConfig, target: Backbone
) -> SideBySide:
    """The SSMs of `models`, each with the seed of its fresh weights."""
    frozen: PreTrainedModel = target.model
    goals = []
    for model, seed in models:
        torch.manual_seed(seed)
        goals.append(distill.build(model, objective, frozen, target.tokenizer, _no_save))
    return SideBySide(goals, target, boost)


def _no_save(_module: nn.Module, _folder: Path) -> None:
    raise ValueError("an SSM beside others is written with them")


def _labels(weight_RS: Tensor, label_RS: Tensor) -> Tensor:
    """The weights of the labels, [P]."""
    return weight_RS[:, 1:][label_RS[:, 1:]]
