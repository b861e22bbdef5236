"""What every method hands to the loop: the module that is trained, and the hooks that the loop calls.

An objective holds the `nn.Module` that is trained (`module`). The forward pass of that module is the loss, so that
wrappers (DDP, DeepSpeed) see one ordinary forward and backward. Every hook has a default here that does nothing or
refuses by name, and a public method that the base does not declare is an error where the class is made: a misspelt
hook cannot go unseen. Read next: `../spine.py`, what drafters of a frozen target add; `../target.py`, an objective
without a teacher; `loop.py`, which drives them.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from ...drafters.layers.row_split import RowSplit
from ...errors import RequestError
from ..methods import METHODS

Batch = dict[str, Tensor]


class FeatureLookahead(Protocol):
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


class Objective(ABC):
    """What a method supplies; everything else is the loop's."""

    module: nn.Module
    """Its forward takes (batch, teacher output) and returns the loss summed over labels, and the sums of all terms,
    each reported as a mean over all labels unless its own number of them is beside it (`sums.COUNT`)."""
    features: Any
    """The source of hidden states that `prepare` asks, a `FeatureLookahead`; None where it asks none."""
    rollouts: RowWriter | None
    """What writes some of the rows anew; None where the data's own are trained on."""

    def __init__(
        self, module: nn.Module, *, features: FeatureLookahead | None = None, rollouts: RowWriter | None = None
    ) -> None:
        self.module, self.features, self.rollouts = module, features, rollouts

    def __init_subclass__(cls, **more: Any) -> None:
        """Refuse a public method that is no hook, which the loop would never call."""
        super().__init_subclass__(**more)
        unknown = [name for name, value in vars(cls).items() if _is_method(value) and not _is_declared(cls, name)]
        if unknown:
            hooks = sorted(name for name, value in vars(Objective).items() if _is_method(value) and name[0] != "_")
            raise TypeError(
                f"{cls.__name__}.{unknown[0]} is no hook of an objective, and the loop would never call it; the hooks "
                f"are {', '.join(hooks)}. A method of its own begins with an underscore"
            )

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """The frozen target's outputs for the batch (the teacher output); None without a target."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the trained model for use outside training."""

    @abstractmethod
    def draft(self) -> nn.Module | None:
        """The module that drafts, for probes; None when the method trains no drafter."""

    def set_steps(self, steps: int) -> None:  # noqa: B027 - a hook that most methods need not
        """Called once, with the steps of the whole run, for a loss that depends on the share that is done."""

    def begin_step(self, step: int, seed: int) -> None:  # noqa: B027
        """Called before the step's first batch, for a loss that changes from step to step.

        `seed` differs from step to step, not between processes.
        """

    def split_rows(self, split: RowSplit) -> None:
        """Called once, before the first batch, where several processes share each row: learn from this part.

        Raises:
            RequestError: the method learns from whole rows alone.
        """
        raise RequestError(
            f"loop.context_parallel is {split.parts}, and this method works on whole rows alone; methods "
            f"{', '.join(name for name, method in METHODS.items() if method.cuts_rows)} can cut them. Set "
            "--loop.context_parallel 1"
        )


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


def _is_declared(cls: type, name: str) -> bool:
    """Whether a base has it, or it is the class's own affair by its name."""
    return name.startswith("_") or any(hasattr(base, name) for base in cls.__mro__[1:])
