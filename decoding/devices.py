"""Where this process computes, what parts take there, and what its processor can do.

Loading, training and the pre-flight ask here; of the processor only what decides which kernel is fastest. Nothing
reads a clock, so that equal runs on one machine choose alike.

Read next: `backbone/loading.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch

from ..errors import RequestError

# cuBLAS reads it once, before its first product: a run that is to be repeated bit for bit would be refused later on
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def runs_on_cpu() -> bool:
    """Whether models go to the CPU: there is no GPU, or the launch leaves it out as accelerate's launches do."""
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in {"1", "true", "t", "yes", "y", "on"}
    return asked or not torch.cuda.is_available()


def check_device(device: Any) -> None:
    """Raise RequestError for a device on which torch can put nothing here; it says that itself in many ways."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        has = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        raise RequestError(
            f"device is {device!r:.60}, which this machine does not have ({str(error).splitlines()[0]:.80}); expected "
            f"one of {', '.join(has)}, or None for the GPU where there is one"
        ) from None


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


Kind = Literal["amx", "avx512", "narrower"]
"""As products of fp32 with few rows differ: Intel's processors that have tiles, which such products do not use; others
with registers of 512 bits; those with narrower ones."""


def kind() -> Kind:
    """The kind of this machine's processor; `avx512` where torch does not say."""
    found = _capabilities()
    if found.get("amx_tile"):
        return "amx"
    return "avx512" if found.get("avx512_f", True) else "narrower"


def multiplies_bf16() -> bool:
    """Whether there are instructions for products of bf16; elsewhere torch makes them too, far slower than of fp32."""
    found = _capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


@cache
def _capabilities() -> dict[str, Any]:
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found
