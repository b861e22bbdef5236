"""Sums over all processes: of one number, or of numbers by name.

In one process the values are returned as they are, without a collective call. Numbers that lie on the host are added
up there, over gloo: on the device they would have to be read, and with them whatever is queued before. Read next:
`loop.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

COUNT = "labels of "
"""In front of a term's name: how many labels its sum is over, where they are not all."""
COMPARED = "comparisons of "
"""In front of a term's name: a number that is 0 where its sum is over nothing, though there are labels."""


def means(sums: Mapping[str, float], labels: float) -> dict[str, float]:
    """The mean of every term, over `labels` unless it has a count of its own (`COUNT`); none where that is 0, or
    where nothing was compared (`COMPARED`)."""
    found = {}
    for name, value in sums.items():
        count = sums.get(COUNT + name, labels)
        if not name.startswith((COUNT, COMPARED)) and count and sums.get(COMPARED + name, count):
            found[name] = value / max(1.0, count)
    return found


def all_finite(accelerator: Accelerator, sums: dict[str, Tensor]) -> Tensor:
    """Whether every sum is finite on every process: bool, a scalar where the sums are; the host reads nothing."""
    flags = [torch.isfinite(each) for each in sums.values()]
    good = torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool, device=accelerator.device)
    if accelerator.num_processes == 1:
        return good
    bad: Tensor = accelerator.reduce((~good).float(), reduction="sum")
    return bad == 0


def total(accelerator: Accelerator, value: float) -> float:
    """The sum of a number over all processes, which call this together."""
    if accelerator.num_processes == 1:
        return float(value)
    summed = torch.tensor(float(value), dtype=torch.float64)
    how = accelerator.init_handler
    dist.all_reduce(summed, group=hosts(dist.group.WORLD, None if how is None else how.timeout))
    return float(summed)


@cache
def hosts(world: Any, bound: timedelta | None) -> Any:
    """A group of all processes that adds up what lies on their hosts: `world` itself where it is one.

    Args:
        world: the group that all processes are in.
        bound: how long one process waits for another; None: as long as gloo does by default.
    """
    return world if dist.get_backend(world) == "gloo" else dist.new_group(backend="gloo", timeout=bound)


def add_terms(sums: dict[str, Tensor], terms: Mapping[str, Any]) -> None:
    """Add scalars to those of their names, in float64 and where they were made; the host reads nothing."""
    for name, value in terms.items():
        part = torch.as_tensor(value).detach().double()
        sums[name] = sums[name] + part if name in sums else part


def totals(accelerator: Accelerator, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Sums over all processes by name, read; a process whose rows have no labels may lack some names."""
    own = {name: float(value) for name, value in sums.items()}
    if accelerator.num_processes == 1:
        return own
    merged: dict[str, float] = {}
    for part in gather_object([own]):
        for name, value in part.items():
            merged[name] = merged.get(name, 0.0) + value
    return merged
