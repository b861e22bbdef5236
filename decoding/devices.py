"""Where this process computes, asked by loading, training and the pre-flight alike.

Read next: `target/loading.py`.
"""

from __future__ import annotations

import os

import torch

# cuBLAS reads it once, before its first product: a run that is to be repeated bit for bit would be refused later on
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def runs_on_cpu() -> bool:
    """Whether models go to the CPU: there is no GPU, or the launch leaves it out as accelerate's launches do."""
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in {"1", "true", "t", "yes", "y", "on"}
    return asked or not torch.cuda.is_available()
