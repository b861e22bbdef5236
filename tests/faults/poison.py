"""Values that are not finite, planted into chosen steps of a real run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from draftsmith.trainers.loop import state
from draftsmith.trainers.loop.loop import Loop
from faults import toy
from safetensors.torch import save_file
from torch import Tensor

KINDS = ("loss", "gradient", "feature")
Planted = Callable[[int], str | None]
"""What a step is to be given on this process: one of `KINDS`, or None."""


class Poison:
    """Plants what `planted` says, and remembers the steps that moved a weight though they were poisoned."""

    def __init__(self, loop: Loop, planted: Planted, poisoned: Callable[[int], bool]) -> None:
        """`poisoned`: whether any process is given something in a step."""
        self._loop, self._planted, self._poisoned = loop, planted, poisoned
        self._now: str | None = None
        self.moved: list[int] = []
        self._take = loop.train_step
        loop.train_step = self._step  # type: ignore[method-assign]
        loop.objective.module.register_forward_hook(self._behind_forward)
        features: Any = getattr(loop.objective, "features", None)
        if features is not None:
            self._fetch = features.fetch
            features.fetch = self._fetched

    def _step(self, step: int, *rest: Any) -> None:
        self._now = self._planted(step)
        before = weights(self._loop)
        self._take(step, *rest)
        after = weights(self._loop)
        same = all(torch.equal(before[name], after[name]) for name in before)
        if self._poisoned(step) != same or not all(map(is_finite, after.values())):
            self.moved.append(step)
        self._now = None

    def _behind_forward(self, _module: Any, _given: Any, made: tuple[Tensor, dict[str, Tensor]]) -> Any:
        loss, terms = made
        if self._now == "loss":
            return loss * torch.nan, {name: value * torch.nan for name, value in terms.items()}
        if self._now == "gradient" and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * torch.inf)
        return None

    def _fetched(self, batch: Any) -> Any:
        states = self._fetch(batch)
        return tuple(each * torch.nan for each in states) if self._now == "feature" else states


def weights(loop: Loop) -> dict[str, Tensor]:
    """Copies of what is trained."""
    return {name: tensor.clone() for name, tensor in state.trainable(loop.objective.module).items()}


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def kind_of(step: int) -> str | None:
    """What some process is given in a step: every second one is poisoned, with each kind in turn."""
    return KINDS[step // 2 % len(KINDS)] if step % 2 else None


def run(out: Path, steps: int) -> None:
    """The body of a process: every second step is poisoned, on one process alone, each in turn."""
    loop = toy.loop_in(out, "medusa", steps=steps, every=steps, validate_every=steps)
    rank, world = loop.accelerator.process_index, loop.accelerator.num_processes
    poison = Poison(
        loop,
        lambda step: kind_of(step) if step // 2 // len(KINDS) % world == rank else None,
        lambda step: kind_of(step) is not None,
    )
    toy.run(loop)
    assert poison.moved == [], poison.moved
    assert loop.steps.skipped == steps // 2
    save_file({name: each.contiguous() for name, each in weights(loop).items()}, out / f"weights-{rank}.safetensors")


def broken_weight(out: Path, broken: int, at: int) -> None:
    """The body of a process: on process `broken` one weight turns non-finite behind step `at`."""
    loop = toy.loop_in(out, "medusa", every=1, keep=20)

    def break_it(step: int) -> None:
        if step == at and loop.accelerator.process_index == broken:
            with torch.no_grad():
                next(iter(state.trainable(loop.objective.module).values())).view(-1)[0] = torch.nan

    toy.run(loop, watch=break_it)
