"""Triton kernels for the two places where a step touches the whole vocabulary: warp and verify.

They compute what `../sampling.py` defines and are tested against it; a machine without them loses
time, not results. Triton is imported by `warp.py` and `verify.py`, never here.
Read next: `warp.py`.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def available() -> bool:
    """Whether Triton is installed and there is a CUDA device to run it on. Imports no Triton."""
    return find_spec("triton") is not None and torch.cuda.is_available()
