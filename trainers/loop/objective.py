"""The interface of a method for the loop.

An objective holds the `nn.Module` that is trained (`module`). The forward pass of that module is the loss, so that
wrappers (DDP, DeepSpeed) see one ordinary forward and backward.
Read next: `target.py` and `distill.py`, the objectives; `packed/passes.py`, what most of them begin with; `loop.py`,
which drives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from ...drafters.layers.row_split import RowSplit

Batch = dict[str, Tensor]


class Objective(Protocol):
    """What a method supplies; everything else is the loop's."""

    module: nn.Module
    """Its forward takes (batch, teacher output) and returns the loss summed over labels, and the sums of all terms,
    each reported as a mean over all labels unless its own number of them is beside it (`sums.COUNT`)."""

    def prepare(self, batch: Batch) -> Any:
        """The frozen target's outputs for the batch (the teacher output); None without a target."""

    def export(self, folder: Path) -> None:
        """Write the trained model for use outside training."""

    def draft(self) -> nn.Module | None:
        """The module that drafts, for probes; None when the method trains no drafter."""


@runtime_checkable
class Stepwise(Protocol):
    """An objective whose loss changes from step to step."""

    def begin_step(self, step: int, seed: int) -> None:
        """Called before the step's first batch; `seed` differs from step to step, not between processes."""


@runtime_checkable
class Scheduled(Protocol):
    """An objective whose loss depends on the share of the run that is done."""

    def set_steps(self, steps: int) -> None:
        """Called once, with the number of steps of the whole run."""


@runtime_checkable
class CutsRows(Protocol):
    """An objective that can learn from a part of every row, while other processes learn from the rest."""

    def split_rows(self, split: RowSplit) -> None:
        """Called once, before the first batch, where several processes share each row."""


class LooksAhead(Protocol):
    """Where hidden states of the frozen target come from, as the loop sees it (`teacher/features.py`)."""

    layers: tuple[int, ...]
    """Which hidden states these are."""
    looks_ahead: bool
    """Whether it gains by being told what it will be asked."""

    def expect(self, batch: Batch) -> None:
        """Begin to fetch a batch, whose states will be asked for by the same object."""

    def take_waited(self) -> float:
        """Seconds spent waiting for data, not for the target itself, since the last call."""

    def forget(self) -> None:
        """Let go of what is expected: it will not be asked for."""

    def close(self) -> None:
        """Forget what is expected, and leave no thread behind."""


@runtime_checkable
class Featured(Protocol):
    """An objective whose `prepare` asks a source of hidden states."""

    features: LooksAhead


class RowWriter(Protocol):
    """Replaces a share of the rows by text that the models generate (`teacher/rollouts.py`)."""

    kept: Batch | None
    """The rows of the last time, which a resumed run may train on again."""

    def rewrite(self, batches: Sequence[Batch], indices: Sequence[int], step: int, seed: int) -> list[Batch]:
        """A step's micro-batches, rows replaced; `indices`: the rows' indices in the global batch."""

    def of_all(self, parts: Sequence[Batch]) -> Batch:
        """The rows of the global batch, from what every process has kept."""

    def recall(self, rows: Batch, rank: int, world: int) -> None:
        """Take this process's share of what `of_all` gave as kept."""


@runtime_checkable
class OnPolicy(Protocol):
    """An objective that can train on rows that the models generate themselves."""

    rollouts: RowWriter | None
    """None where the recipe asks for no such rows."""
