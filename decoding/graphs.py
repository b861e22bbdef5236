"""Steps recorded once as a CUDA graph and replayed, without Python and without single launches.

A recorded step reads and writes fixed addresses: the engine's state is updated in place, and the
random numbers of a step are copied into a fixed block before every replay, so that no number is
used twice. A step that waits for the device cannot be a graph. So the second step runs under torch's own watch
for waits; if one waits, all steps are launched one by one, and a message says so once.

Steps are recorded for every request, and the recordings are freed with it. A recording holds the addresses of weights
and of all that target and drafter keep of their rows, and what Python decided while it was made. If it were kept,
weights that were laid out again, or a draft length or an adapter that was set in between, would silently be replayed
as they were. The cost is reported apart (`Generation.recording_seconds`); short answers, for which it would not pay,
are not recorded.

Read next: `engine.py`.

Shapes: B rows, C numbers that a step takes.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import RequestError
from .backbone.cut import is_cut
from .random import Uniforms

if TYPE_CHECKING:
    from .backbone.backbone import Backbone
    from .proposal import Proposer
    from .rules.acceptance import Rule

LEAST_TOKENS = 32
"""Of an answer for which steps are recorded unasked: two run beforehand, and a recording takes as long as several."""
_WAITS = "synchronizing CUDA operation"
_log = logging.getLogger(__name__)


class RecordedUniforms(Uniforms):
    """Random numbers of one step at a fixed address; before `hold`, the numbers of `source` themselves."""

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

    def release(self) -> None:
        """Hand out those of `source` themselves again, from the next step on."""
        self._held_BC = None


def recordings_for(
    asked: bool | None,
    target: Backbone,
    *,
    static: bool,
    tokens: int,
    drafter: Proposer | None = None,
    rule: Rule | str | None = None,
) -> Recordings | None:
    """Where the steps of a request are recorded; None: they are launched one by one.

    Args:
        asked: as of `generate`; None: where it can be and pays.
        tokens: of the answer at most.

    Raises:
        RequestError: they were asked for, and cannot be.
    """
    device = target.device
    worthwhile = device.type == "cuda" and static and tokens >= LEAST_TOKENS
    if not (worthwhile if asked is None else asked):
        return None
    reason = _takes_part(target, drafter, rule)
    if reason is None and device.type != "cuda":
        raise RequestError(
            f"CUDA graphs were asked for, and the target is on {device.type}; put it on a GPU or leave them out"
        )
    if reason is None and not static:
        reason = "static is False, so that shapes follow what the host reads"
    if reason is None:
        return Recordings(insists=bool(asked))
    _refuse_or_say(reason, insists=bool(asked))
    return None


def _takes_part(target: Backbone, drafter: Proposer | None, rule: Rule | str | None) -> str | None:
    """How the host takes part in steps of target and drafter, as the middle of a sentence; None if it does not."""
    if drafter is not None and not drafter.replayable:
        return f"{type(drafter).__name__} decides on the host what it drafts"
    if callable(rule):
        return "the acceptance rule is a function, which may decide on the host"
    if is_cut(target.model):
        return "the target lies over processes, which wait for each other"
    return None


def _refuse_or_say(reason: str, *, insists: bool) -> None:
    if insists:
        raise RequestError(f"graphs were asked for, and {reason}, which no CUDA graph holds: leave graphs out")
    _say(reason)


@cache
def _say(reason: str) -> None:
    """Once for every reason."""
    _log.warning("steps are launched one by one: %s, which no CUDA graph holds", reason)


class Recordings:
    """The steps of a request: all are recorded, or none if one of them waits for the device."""

    def __init__(self, *, insists: bool = True) -> None:
        """`insists`: a step that waits is an error."""
        self._insists = insists
        self.given_up = False
        self.seconds = 0.0
        """Time of recording, in which the device has nothing to do."""

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """A step that runs inside must not wait."""
        with _waits() as places:
            yield
        if places:
            self.given_up = True
            _refuse_or_say(f"a step waits for the device at {places[0]}", insists=self._insists)

    @contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """What is launched inside goes into the graph; RequestError where it cannot."""
        torch.cuda.synchronize()  # the steps before belong to decoding
        start = time.perf_counter()
        try:
            # other threads may pin memory or ask for events meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RequestError(
                f"a decoding step could not be recorded as a CUDA graph: {error}. Give graphs=False to `generate` or "
                "`autoregressive`, and report which target and drafter these are"
            ) from error
        self.seconds += time.perf_counter() - start


@contextmanager
def _waits() -> Iterator[list[str]]:
    """The places inside at which the host waits for the device, by torch's own warnings."""
    places: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in said:
        if _WAITS in str(each.message):
            places.append(f"{'/'.join(Path(each.filename).parts[-3:])}:{each.lineno}")
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


class Replayed:
    """A step that runs eagerly twice, is then recorded, and from then on is replayed."""

    def __init__(self, step: Callable[..., Any], uniforms: RecordedUniforms, recordings: Recordings) -> None:
        """`recordings`: of all steps that are recorded with it."""
        self._step, self._uniforms, self._recordings = step, uniforms, recordings
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0
        self._result: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Run the step; once recorded, its result stays at the same address."""
        self._calls += 1
        if self._calls == 2:
            self._uniforms.hold()
            with self._recordings.rehearsal():
                return self._step(*arguments)
        if self._recordings.given_up:
            self._uniforms.release()
        self._uniforms.restart()
        if self._calls == 1 or self._recordings.given_up:
            return self._step(*arguments)
        if self._graph is None:
            self._record(arguments)
        assert self._graph is not None
        self._graph.replay()
        return self._result

    def _record(self, arguments: tuple[Any, ...]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with self._recordings.recording(self._graph):
            self._result = self._step(*arguments)
