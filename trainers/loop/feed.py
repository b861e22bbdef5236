"""The micro-batches of each step, and a hint to the source of features about the next one.

Read next: `loop.py`, which trains on them; `features.py`, where features come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ...decoding.on_host import on_host, sent
from ..teacher.features import Featured
from .objective import Batch, Objective


def labels_in(batches: list[Batch]) -> int:
    """Tokens that count in the loss, which the host knows of the rows that it has sent."""
    return sum(int(on_host(batch["loss_mask"]).sum()) for batch in batches)


def upload(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device, without waiting; the host still knows what it has sent (`on_host`)."""
    return {name: sent(each, device) for name, each in batch.items()}


class Feed:
    """Yields batches in order, and tells the source of features which batch comes next."""

    def __init__(self, batches: Callable[[int], list[Batch]], objective: Objective, *, steps: int) -> None:
        """`batches` makes the micro-batches of a step, on the device; there are `steps`."""
        self._batches, self._steps = batches, steps
        self._features = objective.features if isinstance(objective, Featured) else None
        self._next: tuple[int, list[Batch]] | None = None
        self._waited = 0.0

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of a step."""
        self.take_waited()  # waits during validation and probes do not count for the step
        upcoming, self._next = self._next, None
        return upcoming[1] if upcoming is not None and upcoming[0] == step else self._make(step)

    def look_ahead(self, step: int, batches: list[Batch], number: int) -> None:
        """Call it once the teacher output of batch `number` of `step` has been prepared."""
        if self._features is None or not self._features.looks_ahead:
            return
        if number + 1 < len(batches):
            self._features.expect(batches[number + 1])
        elif step + 1 < self._steps:
            upcoming = self._make(step + 1)
            self._next = (step + 1, upcoming)
            self._features.expect(upcoming[0])

    def forget(self) -> None:
        """Drop what was made and fetched ahead: the micro-batches will be others."""
        self._next = None
        if self._features is not None:
            self._features.forget()

    def _make(self, step: int) -> list[Batch]:
        began = time.perf_counter()
        batches = self._batches(step)
        self._waited += time.perf_counter() - began
        return batches

    def take_waited(self) -> float:
        """Seconds spent waiting for rows and features since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited if self._features is None else waited + self._features.take_waited()

    def close(self) -> None:
        """Cancel features that are being fetched."""
        if self._features is not None:
            self._features.close()
