"""The device of these tests. `GPU_TESTS_ON=cpu pytest tests/gpu` runs on a CPU what can run there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """CUDA; the tests that ask for it skip themselves where there is none."""
    named = torch.device(os.environ.get("GPU_TESTS_ON", "cuda"))
    if named.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return named


@pytest.fixture
def exact() -> Iterator[None]:
    """fp32 is fp32: cuDNN's convolutions round to fewer bits by default, and greedy text would part at near-ties."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """A test that trains leaves the choice of kernels as it was."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)
