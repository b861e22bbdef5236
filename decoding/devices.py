"""Where this process computes, for loading, training and the pre-flight alike; and how long parts of its work take.

Read next: `backbone/loading.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# cuBLAS reads it once, before its first product: a run that is to be repeated bit for bit would be refused later on
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def runs_on_cpu() -> bool:
    """Whether models go to the CPU: there is no GPU, or the launch leaves it out as accelerate's launches do."""
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in {"1", "true", "t", "yes", "y", "on"}
    return asked or not torch.cuda.is_available()


class Spent:
    """Time that a device spends on parts of its work; on CUDA by events of its own, so the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._on_host = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self) -> Iterator[None]:
        """What is launched inside counts."""
        if not self._is_cuda:
            start = time.perf_counter()
            yield
            self._on_host += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    @property
    def seconds(self) -> float:
        """Of all parts; waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._on_host + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
