"""Which operations make the host wait for the device: reads, sizes that hang on numbers, copies that block.

Copies from the host block too, unless they are asked not to and start in pinned memory. Read next:
`benchmarks/common/waits.py`, whose names these are.
"""

from __future__ import annotations

import torch
from draftsmith.benchmarks.common.waits import Watch
from pretended_cuda.call import COPIES, Call
from pretended_cuda.tensor import OnCuda
from torch import Tensor

_PINNED = "lies_in_pinned_memory"
_NUMBERS = ("masked_fill", "masked_fill_", "index_fill", "index_fill_")
"""CUDA's own code asks for the number that these write, where it is a tensor."""


def pinned(tensor: Tensor) -> Tensor:
    """A copy of a tensor of the host in memory that the device reads by itself."""
    made = tensor.clone()
    setattr(made, _PINNED, True)
    return made


def wait_of(call: Call) -> str | None:
    """Why the host waits for an operation; None: it does not."""
    if call.name in COPIES:
        return _copy(call)
    if not call.on_cuda:
        return None
    if call.indexes:
        return _index(call)
    if call.name in _NUMBERS and isinstance(call.args[-1], OnCuda) and call.args[-1].dim() == 0:
        return call.name
    if call.name == "repeat_interleave" and call.kwargs.get("output_size") is not None:
        return None
    return call.name if call.name in Watch.NAMES else None


def _copy(call: Call) -> str | None:
    if call.name == "copy_":
        to, source = call.args[:2]
        to_cuda, later = isinstance(to, OnCuda), call.kwargs.get("non_blocking", False) or True in call.args[2:]
    else:
        source, to_cuda, later = call.args[0], call.to_cuda, call.kwargs.get("non_blocking", False)
    if isinstance(source, OnCuda) == to_cuda:
        return None
    if to_cuda:
        return None if later and getattr(source, _PINNED, False) else "copy to the device"
    return None if later else "copy to the host"


def _index(call: Call) -> str | None:
    masks = (torch.bool, torch.uint8)
    if any(each.dtype in masks for each in call.indices):
        return None if _fills(call) else f"{call.name} by a mask"
    if any(not isinstance(each, OnCuda) for each in call.indices):
        return f"{call.name} by numbers of the host"
    return None


def _fills(call: Call) -> bool:
    """Whether a mask's places are given one number of the host, which takes no list of them."""
    values = call.args[2] if len(call.args) > 2 else None
    return isinstance(values, Tensor) and not isinstance(values, OnCuda) and values.numel() == 1
