"""The micro-batches of each step, and the features of the next one on their way.

Read next: `loop.py`, which trains on them; `features.py`, where features come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..teacher.features import Featured
from .objective import Batch, Objective


class Feed:
    """Hands out batches in their order, and tells the source of features what comes next."""

    def __init__(self, batches: Callable[[int], list[Batch]], objective: Objective, *, steps: int) -> None:
        """`batches` makes the micro-batches of a step, on the device; there are `steps`."""
        self._batches, self._steps = batches, steps
        self._features = objective.features if isinstance(objective, Featured) else None
        self._coming: tuple[int, list[Batch]] | None = None
        self._waited = 0.0

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of a step."""
        self.take_waited()  # what validation and probes waited for is not the step's
        coming, self._coming = self._coming, None
        return coming[1] if coming is not None and coming[0] == step else self._make(step)

    def look_ahead(self, step: int, batches: list[Batch], number: int) -> None:
        """To be called when the teacher output of batch `number` of `step` has been prepared."""
        if self._features is None or not self._features.looks_ahead:
            return
        if number + 1 < len(batches):
            self._features.expect(batches[number + 1])
        elif step + 1 < self._steps:
            coming = self._make(step + 1)
            self._coming = (step + 1, coming)
            self._features.expect(coming[0])

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
        """Stop what is on its way."""
        if self._features is not None:
            self._features.close()
