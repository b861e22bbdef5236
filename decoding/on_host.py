"""Tensors on a device whose numbers the host knows too, because it made them.

Shapes depend on how many places of a mask are true, or how long a document is. If the host asks the device, it waits
for all that was launched before. For rows that were packed here it need not ask: a tensor that is sent to a device
keeps its twin on the host, and what decides shapes is counted there. A tensor that was made on the device has no twin,
so the host waits for a copy. Read next: `trainers/loop/feed.py`, which sends rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_TWIN = "twin_on_host"
_HOSTS = frozenset({"cpu"})
"""Kinds of devices that are no other machine than the host; tests leave out a CPU, which stands in for a GPU then."""


def is_host(device: torch.device) -> bool:
    """Whether the host reads what lies there without waiting."""
    return device.type in _HOSTS


def sent(twin: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, its twin kept; for a GPU by pinned memory, as other copies are waited for."""
    if is_host(device):
        return twin.to(device)
    is_cuda = device.type == "cuda"
    on_device = twin.contiguous().pin_memory().to(device, non_blocking=True) if is_cuda else twin.to(device, copy=True)
    setattr(on_device, _TWIN, twin)
    return on_device


def on_host(tensor: Tensor) -> Tensor:
    """The same numbers where the host reads them: the tensor itself, its twin, or a copy that is waited for."""
    twin: Tensor | None = getattr(tensor, _TWIN, None)
    return tensor.cpu() if twin is None else twin  # of one that lies on the host `cpu` is the tensor itself


def all_on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`on_host` of each."""
    return {name: on_host(each) for name, each in tensors.items()}


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Some rows of a tensor; the host knows their numbers if it knows those of all rows."""
    part, twin = tensor[rows], getattr(tensor, _TWIN, None)
    if twin is not None:
        setattr(part, _TWIN, twin[rows])
    return part


def places(mask: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Where a mask of the host is true, int64 [P] for each dimension, on a device: indices in place of a mask."""
    return tuple(sent(each, device) for each in mask.nonzero(as_tuple=True))


def distinct(numbers_P: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of a tensor of the host, each once and ascending, and where each of them is among those, [P]."""
    return numbers_P.unique(return_inverse=True)
