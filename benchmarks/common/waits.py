"""Which operations make the host wait for the device, by name and place.

A step that waits cannot be launched while the one before it still runs. Read next:
`benchmarks/on_gpu/speculation.py`, which watches steady speculative steps.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import generate
from draftsmith.decoding.proposal import Committed, Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_HERE = Path(__file__).resolve()
_PACKAGE = _HERE.parents[2]  # of a link to the checkout too

Call = Callable[[], object]


class Watch(TorchDispatchMode):
    """Counts the operations that make the host wait, while it is open.

    On CUDA torch itself says so (`set_sync_debug_mode("error")`): the operation is noted, and run
    again without complaint. Elsewhere the operations are known by name.
    """

    NAMES = frozenset(
        {
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "equal",
            "allclose",
            "_unique2",
            "unique_dim",
            "unique_consecutive",
            "bincount",
            "repeat_interleave",
        }
    )

    def __init__(self, *, cuda: bool) -> None:
        super().__init__()
        self.cuda = cuda
        self.waits: Counter[str] = Counter()
        self._open = False

    @property
    def open(self) -> bool:
        return self._open

    @open.setter
    def open(self, value: bool) -> None:
        self._open = value
        if self.cuda:
            torch.cuda.set_sync_debug_mode("error" if value else "default")

    def note(self, name: str) -> None:
        """Count an operation under its name and the nearest line of the package."""
        files = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
        lines_of_code = (f"{Path(file).name}:{line}" for file, line in files if _is_ours(file))
        line_of_code = next(lines_of_code, "an unknown place")
        self.waits[f"{name} at {line_of_code}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._open:
            return func(*args, **kwargs)
        with self:  # in inference mode `item` comes here whole; its parts are what is known
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func.overloadpacket.__name__
        if self.cuda:
            return self._run_on_cuda(name, lambda: func(*args, **kwargs))
        if self._is_known(name, args) and any(map(self.holds, _tensors(args))):
            self.note(name)
        return func(*args, **kwargs)

    def holds(self, _tensor: Tensor) -> bool:
        """Whether a tensor lies where reading it waits; where nothing tells them apart, every one does."""
        return True

    def _is_known(self, name: str, args: tuple[Any, ...]) -> bool:
        return name in self.NAMES or (name in ("index", "index_put_") and _has_mask(args[1]))

    def _run_on_cuda(self, name: str, call: Call) -> object:
        try:
            return call()
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
        self.note(name)
        with _allowed():
            return call()


class WatchCopies(TorchFunctionMode):
    """Notes the ways from a tensor to the host that no operation shows on a CPU."""

    NAMES = frozenset({"tolist", "numpy", "cpu"})

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        watch = self._watch
        if watch.open and not watch.cuda and name in self.NAMES and any(map(watch.holds, _tensors(args))):
            watch.note(name)
        return func(*args, **(kwargs or {}))


@cache
def _is_ours(file: str) -> bool:
    """Whether that is code of the package or of its tests, and not this file."""
    path = Path(file).resolve()
    return path.is_relative_to(_PACKAGE) and path != _HERE and "site-packages" not in path.parts


class Watched:
    """Before a drafter's class: it opens the watch for some steps, the first two left out."""

    def observe_with(self, watch: Watch, steps: int) -> Self:
        """Let that watch see so many steps."""
        self._watch, self._steps, self._calls, self.watched = watch, steps, 0, 0
        return self

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Draft, watched or not."""
        self._calls += 1
        self._watch.open = 2 < self._calls <= 2 + self._steps
        self.watched += self._watch.open
        proposal: Proposal = super().propose(last_B, warper, uniforms)  # type: ignore[misc]
        return proposal

    def observe(self, committed: Committed) -> None:
        """Learn what was accepted; behind this the engine's step is over."""
        super().observe(committed)  # type: ignore[misc]
        # behind this the host reads the step before; on CUDA a copy that has arrived, and no wait,
        # on a CPU an operation like any other
        self._watch.open = self._watch.open and self._watch.cuda


def count_waits(
    target: Backbone,
    drafter: Any,
    prompt: Sequence[int],
    *,
    warper: Warper,
    steps: int,
    room: int,
    static: bool = True,
) -> dict[str, Any]:
    """Operations of steady speculative steps that make the host wait, by name and place.

    Steps run without graphs, so that every operation shows.

    Args:
        drafter: one whose class begins with `Watched`.
        steps: those that are watched, at most.
        room: tokens of the answer, enough for the steps if every draft is accepted.
    """
    watch = Watch(cuda=target.device.type == "cuda")
    drafter.observe_with(watch, steps)
    try:
        with watch, WatchCopies(watch):
            generate(target, drafter, [prompt], warper=warper, max_new_tokens=room, static=static, graphs=False)
    finally:
        watch.open = False
    # the steps that were seen, not those asked for: an unwatched run would count 0 as well
    return {"steps": drafter.watched, "count": watch.waits.total(), "places": dict(watch.waits)}


def _tensors(args: Any) -> list[Tensor]:
    return [each for each in tree_leaves(args) if isinstance(each, Tensor)]


def _has_mask(indices: Any) -> bool:
    """Whether indexing goes by a mask, whose size the host must know."""
    masks = (torch.bool, torch.uint8)
    return any(isinstance(each, Tensor) and each.dtype in masks for each in indices)


@contextmanager
def _allowed() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("error")
