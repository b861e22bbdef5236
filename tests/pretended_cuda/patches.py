"""Opens the pretended device, and tells torch what it has to be told meanwhile; afterwards all is as before.

Not pretended: streams, generators of the device, Triton's kernels, several devices, and what a GPU rounds
otherwise. Read next: `tests/test_pretended_cuda.py`, what it refuses and what waits; `tests/drafters/test_on_cuda.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from draftsmith.decoding import kernels
from pretended_cuda.device import PretendedCuda
from pretended_cuda.graphs import Graph, recorder
from pretended_cuda.names import Names


class Event:
    """A point in the work of the device, which is always done."""

    def __init__(self, *, enable_timing: bool = False) -> None: ...

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds."""
        return (later._at - self._at) * 1e3


@contextmanager
def pretended_cuda() -> Iterator[PretendedCuda]:
    """Let tensors lie on `cuda` as long as this lasts. Not where CUDA is: `tests/gpu` asks it itself."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which tests/gpu asks itself")
    with pytest.MonkeyPatch.context() as patch, Names(), PretendedCuda() as device:
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.graph is not None)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: device.tells)
        patch.setattr(
            torch.cuda, "set_sync_debug_mode", lambda mode: setattr(device, "tells", int(mode not in (0, "default")))
        )
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", recorder(device))
        # weights stay the same objects when they move, as those on CUDA do, tied ones together
        patch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        patch.setattr(kernels, "available", lambda: False)
        yield device
