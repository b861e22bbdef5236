"""Triton kernels: the walk down a candidate tree, and what stands between the products of a layer.

Each computes what plain torch defines elsewhere and is tested against it; a machine without them loses
time, not results. Triton is imported by the files beside this one, never here.
Read next: `verify.py`; `layer.py`.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def available() -> bool:
    """Whether Triton is installed and there is a CUDA device to run it on. Imports no Triton."""
    return find_spec("triton") is not None and torch.cuda.is_available()
