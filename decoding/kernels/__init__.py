"""The Triton kernel of a step: the walk down a tree, which else takes an operation per child and depth.

It computes what `../rules/acceptance.py` defines and is tested against it; a machine without it loses
time, not results. Triton is imported by `verify.py`, never here.
Read next: `verify.py`.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def available() -> bool:
    """Whether Triton is installed and there is a CUDA device to run it on. Imports no Triton."""
    return find_spec("triton") is not None and torch.cuda.is_available()
