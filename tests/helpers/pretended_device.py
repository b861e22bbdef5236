"""A CPU that stands in for a device: which tensors would lie there, and where the host reads one of them.

A tensor is the device's if it was sent there (`decoding/on_host.py`), if it is a weight, or if such a one went into it.
What is worked out from the rows on the host alone is the host's, and reading it costs nothing. So no file and no
function needs to be forgiven for counting what the host knows. Not seen: a tensor that is made on the device of no
other (`torch.zeros(..., device=...)`), and a copy by `to`, as both look alike for either side. Read next:
`benchmarks/common/waits.py`, the operations that wait; `tests/gpu/test_unread.py`, the same by torch's own word.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import draftsmith
import pytest
from draftsmith.benchmarks.common.waits import Watch, WatchCopies
from draftsmith.decoding import on_host
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

ROOT = Path(draftsmith.__file__).resolve().parent


class Place(NamedTuple):
    """A function of the package, its class in front."""

    file: str
    function: str


class PretendedDevice(Watch):
    """Notes the functions that read the device, while it is open."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """`modules`: those whose weights lie on the device."""
        super().__init__(cuda=False)
        self.read: dict[Place, set[str]] = {}
        """Function -> the operations by which it read."""
        self._held: dict[int, StorageWeakRef] = {}  # as long as one refers to a storage, no other has its number
        for module in modules:
            for each in (*module.parameters(), *module.buffers()):
                self._hold(each)

    def holds(self, tensor: Tensor) -> bool:
        return hasattr(tensor, "twin_on_host") or tensor.untyped_storage()._cdata in self._held

    def note(self, name: str) -> None:
        self.read.setdefault(nearest(), set()).add(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if self.open and any(self.holds(each) for each in _tensors((args, kwargs))):
            for each in _tensors(made):
                self._hold(each)
        return made

    def _hold(self, tensor: Tensor) -> None:
        made = StorageWeakRef(tensor.untyped_storage())
        self._held[made.cdata] = made


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def nearest() -> Place:
    """The innermost function of the package, and not of its tests, that is running."""
    for frame, _ in traceback.walk_stack(None):
        file = Path(frame.f_code.co_filename).resolve()
        room = file.relative_to(ROOT).parts[0] if file.is_relative_to(ROOT) else "."
        if room not in ("tests", "benchmarks") and not room.startswith("."):
            return Place(str(file.relative_to(ROOT)), frame.f_code.co_qualname)
    return Place("", "no function of the package")


@contextmanager
def watched(loop: Any, steps: range, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedDevice]:
    """Let a CPU stand in for a device as long as this lasts, and note what some steps of a loop read."""
    monkeypatch.setattr(on_host, "_HOSTS", frozenset())
    source = getattr(loop.objective, "features", None)  # a target that moves is part of what is trained
    frozen = [] if source is None else [source.target]
    watch, take = PretendedDevice([loop.objective.module, *frozen]), loop.train_step

    def train_step(number: int, *rest: Any) -> None:
        if number not in steps:
            take(number, *rest)
            return
        watch.open = True
        try:
            with watch, WatchCopies(watch):
                take(number, *rest)
        finally:
            watch.open = False

    loop.train_step = train_step
    yield watch
