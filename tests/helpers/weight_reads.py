"""What is read of safetensors files while transformers loads a model: the bytes of every tensor or part of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from transformers import modeling_utils


class Reads:
    """Bytes read since the beginning, over all threads."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    def noted(self, tensor: Tensor) -> Tensor:
        self.sizes.append(tensor.nbytes)
        return tensor


class _Part:
    """A tensor of a file, of which parts are read."""

    def __init__(self, real: Any, reads: Reads) -> None:
        self._real, self._reads = real, reads

    def __getitem__(self, at: Any) -> Tensor:
        return self._reads.noted(self._real[at])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _File:
    def __init__(self, real: Any, reads: Reads) -> None:
        self._real, self._reads = real, reads

    def get_slice(self, name: str) -> _Part:
        return _Part(self._real.get_slice(name), self._reads)

    def get_tensor(self, name: str) -> Tensor:
        return self._reads.noted(self._real.get_tensor(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __enter__(self) -> _File:
        return _File(self._real.__enter__(), self._reads)

    def __exit__(self, *given: Any) -> Any:
        return self._real.__exit__(*given)


@contextmanager
def counted_reads() -> Iterator[Reads]:
    """Count as long as this lasts."""
    reads, real = Reads(), modeling_utils.safe_open
    with mock.patch.object(modeling_utils, "safe_open", lambda *given, **named: _File(real(*given, **named), reads)):
        yield reads
