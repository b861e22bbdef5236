"""Sums over all processes: of one number, or of numbers by name.

In one process the values are returned as they are, without a collective call. Read next: `loop.py`.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor


def all_finite(accelerator: Accelerator, sums: dict[str, Tensor]) -> Tensor:
    """Whether every sum is finite on every process: bool, a scalar where the sums are; the host reads nothing."""
    flags = [torch.isfinite(each) for each in sums.values()]
    good = torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool, device=accelerator.device)
    if accelerator.num_processes == 1:
        return good
    bad: Tensor = accelerator.reduce((~good).float(), reduction="sum")
    return bad == 0


def total(accelerator: Accelerator, value: float) -> float:
    """The sum of a number over all processes."""
    if accelerator.num_processes == 1:
        return float(value)
    tensor = torch.tensor(float(value), dtype=torch.float64, device=accelerator.device)
    return float(accelerator.reduce(tensor, reduction="sum"))


def totals(accelerator: Accelerator, sums: dict[str, float]) -> dict[str, float]:
    """Sums over all processes by name; a process whose rows have no labels may lack some names."""
    if accelerator.num_processes == 1:
        return sums
    merged: dict[str, float] = {}
    for part in gather_object([sums]):
        for name, value in part.items():
            merged[name] = merged.get(name, 0.0) + value
    return merged
