"""The micro-batches of each step, made while the one before it is computed, and a hint to the source of features.

The host makes the rows of the next step, and sends them, as soon as it has launched the last gradient of this one, or
earlier where features are fetched ahead. That holds for every method and every target, as rows depend on the seed and
the step alone. On a CPU nothing is computed meanwhile, so it neither gains nor costs anything there. What cannot be
made ahead are rows that the models write anew (`../teacher/rollouts.py`): they depend on the weights that this step
leaves. What they are written from is. Read next: `loop.py`, which trains on them; `teacher/features.py`,
where features come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ...decoding.on_host import on_host, sent
from .objective import Batch, FeatureLookahead, Objective


def labels_in(batches: list[Batch]) -> int:
    """Tokens that count in the loss, which the host knows of the rows that it has sent."""
    return sum(int(on_host(batch["loss_mask"]).sum()) for batch in batches)


def upload(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device, without waiting; the host still knows what it has sent (`on_host`)."""
    return {name: sent(each, device) for name, each in batch.items()}


class Feed:
    """Yields batches in order, makes a step's ahead, and tells the source of features which batch comes next."""

    def __init__(self, batches: Callable[[int], list[Batch]], objective: Objective, *, steps: int) -> None:
        """`batches` makes the micro-batches of a step, on the device; there are `steps`."""
        self._batches, self._steps = batches, steps
        self._features: FeatureLookahead | None = objective.features
        self._next: tuple[int, list[Batch]] | None = None
        self._waited = 0.0

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of a step."""
        self.take_waited()  # waits during validation and probes do not count for the step
        upcoming, self._next = self._next, None
        return upcoming[1] if upcoming is not None and upcoming[0] == step else self._make(step)

    def look_ahead(self, step: int, batches: list[Batch], number: int) -> None:
        """Have the next batch's features fetched, once the teacher output of batch `number` of `step` is prepared."""
        if self._features is None or not self._features.looks_ahead:
            return
        last = number + 1 == len(batches)
        if last:
            self.make_next(step)
            upcoming = [] if self._next is None else self._next[1]
        else:
            upcoming = batches[number + 1 :]
        if upcoming:
            self._features.expect(upcoming[0])

    def make_next(self, step: int) -> None:
        """Make the micro-batches of the step behind `step`, if there is one and they are not there yet."""
        if self._next is None and step + 1 < self._steps:
            self._next = (step + 1, self._make(step + 1))

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
