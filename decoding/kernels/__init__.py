"""Triton kernels: between a layer's products, for products of few rows, attention in parts, the walk down a tree.

Each computes what plain torch defines elsewhere and is tested against it; a machine without them loses time, not
results. Triton is imported by their files, never here.
Read next: `layer.py`, `attend.py`, `product.py`; `verify.py`.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def available() -> bool:
    """Whether Triton is installed and there is a CUDA device to run it on. Imports no Triton."""
    return find_spec("triton") is not None and torch.cuda.is_available()


def serve(x: Tensor) -> bool:
    """Whether kernels run for `x`: on CUDA, without gradients, where nothing is being compiled."""
    return x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling() and available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, [..., O]: of few rows by the kernel that streams the weight past them."""
    if serve(x):
        from . import product

        if product.fits(x, weight):
            return product.product(x, weight, bias)
    return F.linear(x, weight, bias)
