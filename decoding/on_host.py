"""Tensors on a device whose numbers the host knows too, because it made them.

How many places of a mask are true, or how long a document is, decides shapes. Asked of the device, the host waits for
all that was launched before; of rows that were packed here it need not ask. So what is sent to a device keeps its
twin on the host, and whatever shapes hang on is counted there. Of tensors that were made on the device there is no
twin, and the host waits for a copy. Read next: `trainers/loop/feed.py`, which sends rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TWIN = "twin_on_host"


def sent(twin: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, its twin kept; for a GPU by pinned memory, as other copies are waited for."""
    if device.type == "cpu":
        return twin.to(device)
    on_device = twin.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else twin.to(device)
    setattr(on_device, _TWIN, twin)
    return on_device


def on_host(tensor: Tensor) -> Tensor:
    """The same numbers where the host reads them: the tensor itself, its twin, or a copy that is waited for."""
    if tensor.device.type == "cpu":
        return tensor
    twin: Tensor | None = getattr(tensor, _TWIN, None)
    return tensor.cpu() if twin is None else twin


def places(mask: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Where a mask of the host is true, int64 [P] for each dimension, on a device: indices in place of a mask."""
    return tuple(sent(each, device) for each in mask.nonzero(as_tuple=True))


def distinct(numbers_P: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of a tensor of the host, each once and ascending, and where each of them is among those, [P]."""
    return numbers_P.unique(return_inverse=True)
