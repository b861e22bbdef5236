"""Memory that a step frees is there for the next one: counted in pages that the system makes."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

WORK = """
import resource, sys
import torch
from draftsmith.trainers.loop.memory import keep_freed_memory

def step():
    parts = [torch.ones(1024, 4096) for _ in range(4)]
    return float((parts[0] + parts[1]).exp().sum())

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step(), step()
fresh = pages()
assert keep_freed_memory()
step(), step()
print(fresh, pages())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc"
)
def test_pages_are_made_once() -> None:
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, check=True)
    fresh, kept = map(int, done.stdout.split())
    assert fresh > 64  # the least that it can be, should pages be of 2 MB
    assert kept < fresh / 4
