"""CUDA graphs on the pretended device: what was launched while one was recorded, launched again at the same addresses.

As on CUDA nothing of Python runs in a replay: numbers that the host read or counted are those of the recording, and a
wait in a recording is an error. Otherwise than there a recording computes, so that the first replay has nothing to do.
What a replay makes is written where the recording made it, and all that refers to it is kept. Read next: `device.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pretended_cuda.call import Call
from pretended_cuda.tensor import OnCuda, held
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from pretended_cuda.device import PretendedCuda


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._launched: list[tuple[Call, Any]] = []
        self._is_new = True

    def note(self, call: Call, made: Any) -> None:
        """An operation of the host alone is none of the graph's."""
        if call.on_cuda or call.to_cuda:
            self._launched.append((call, made))

    def replay(self) -> None:
        """Launch all of it again."""
        if self._is_new:
            self._is_new = False
            return
        for call, made in self._launched:
            again = call.run()
            for old, new in zip(_held(made), _held(again), strict=True):
                # what a view or an operation in place returns lies where it lay
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)

    @property
    def operations(self) -> int:
        return len(self._launched)


def recorder(device: PretendedCuda) -> Any:
    """Stands in for `torch.cuda.graph`."""

    @contextmanager
    def record(graph: Graph, **_how: Any) -> Iterator[None]:
        device.graph = graph
        try:
            yield
        finally:
            device.graph = None

    return record


def _held(made: Any) -> list[Tensor]:
    return [held(each) for each in tree_leaves(made) if isinstance(each, Tensor | OnCuda)]
