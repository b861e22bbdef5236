"""Steps recorded once as a CUDA graph and replayed, without Python and without single launches.

A recorded step reads and writes fixed addresses: the engine's state is updated in place, and the
random numbers of a step are copied into a fixed block before every replay, so that no number is
used twice. Read next: `engine.py`.

Shapes: B rows, C numbers that a step takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import RequestError
from .random import Uniforms

_WARM_UP = 2


class Held(Uniforms):
    """Random numbers of one step at a fixed address; before `hold`, those of `source` themselves."""

    def __init__(self, source: Uniforms) -> None:
        self._source = source
        self._held_BC: Tensor | None = None
        self._taken = 0

    def take(self, count: int) -> Tensor:
        """The next `count` numbers of every row, [B, count]."""
        self._taken += count
        if self._held_BC is None:
            return self._source.take(count)
        return self._held_BC[:, self._taken - count : self._taken]

    def restart(self) -> None:
        """Begin a step: put its numbers in place; before `hold`, count how many it takes."""
        if self._held_BC is not None:
            self._held_BC.copy_(self._source.take(self._held_BC.shape[1]))
        self._taken = 0

    def hold(self) -> None:
        """Begin a step, and keep its numbers and those of all later ones at one address."""
        self._held_BC = self._source.take(self._taken).clone()
        self._taken = 0


class Replayed:
    """A step that runs eagerly twice, is then recorded, and from then on is replayed."""

    def __init__(self, step: Callable[..., Any], uniforms: Held, device: torch.device) -> None:
        if device.type != "cuda":
            raise RequestError(
                f"CUDA graphs were asked for, and the target is on {device.type}; put it on a GPU or leave them out"
            )
        self._step, self._uniforms = step, uniforms
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0
        self._result: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Run the step; from the recording on its result stays at the same address."""
        self._calls += 1
        if self._calls == _WARM_UP + 1:
            self._uniforms.hold()
            self._record(arguments)
        else:
            self._uniforms.restart()
        if self._graph is None:
            return self._step(*arguments)
        self._graph.replay()
        return self._result

    def _record(self, arguments: tuple[Any, ...]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = self._step(*arguments)
