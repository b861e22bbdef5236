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
from typing import cast

import torch
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...drafters.folder import save_draft_model
from ...drafters.model.ensemble import save_ensemble
from ..labels import labelled
from ..loop.objective import Batch, Objective
from ..losses.chunked import Teacher
from ..method_config import BoostConfig
from ..packed.passes import hidden_states
from ..student.distillation import DraftStudent, teacher_of
from ..teacher.features import OnlineFeatures
from ..teacher.frozen import freeze
from .coverage import acceptance, matched, weights


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
        matched_RS = torch.zeros_like(label_RS)
        matched_RS[:, 1:][label_RS[:, 1:]] = matched(hidden_PH, head.projection, label_P, head.chunk)
        return acceptance(matched_RS, label_RS, self.config)


class SideBySide(Objective):
    """Trains the SSMs of an ensemble together."""

    def __init__(self, students: Sequence[DraftStudent], target: Backbone, config: BoostConfig) -> None:
        self._students, self._target = list(students), target
        # one source: the teacher output is the same for all
        super().__init__(Together(students, config), features=OnlineFeatures(freeze(target.model)))

    def set_steps(self, steps: int) -> None:
        """How long the run is, for mixes that move."""
        for student in self._students:
            student.set_steps(steps)

    def begin_step(self, step: int, _seed: int) -> None:
        """Minimise that step's mix."""
        for student in self._students:
            student.begin_step(step)

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Teacher:
        """The target's last hidden states at the labelled positions, once for all."""
        (hidden_RSH,) = self.features(batch)
        return teacher_of(self._target.model, hidden_RSH, batch)

    def _drafts(self) -> list[nn.Module]:
        """The SSMs in their order."""
        return [student.draft for student in self._students]

    def draft(self) -> nn.Module:
        """All SSMs, as they decode: an ensemble."""
        return nn.ModuleList(self._drafts())

    def export(self, folder: Path) -> None:
        """An ensemble of ordinary draft models."""
        with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
            members = [Path(staging) / str(number) for number in range(len(self._students))]
            for member, draft in zip(members, self._drafts(), strict=True):
                save_draft_model(draft, member, self._target)
            save_ensemble(folder, members, self._target)


def _labels(weight_RS: Tensor, label_RS: Tensor) -> Tensor:
    """The weights of the labels, [P]."""
    return weight_RS[:, 1:][label_RS[:, 1:]]
