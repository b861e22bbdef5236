"""Calls in Python that would ask torch for CUDA itself, put so that they need none.

`device="cuda"` is `meta` for C++ (`tensor.py`), where nothing is initialised by that; numbers are made on the CPU and
moved, and so are lists of places, as `meta` would drop them. Read next: `device.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from pretended_cuda.tensor import IN_C, OnCuda, is_pretended
from pretended_cuda.waits import pinned
from torch import Tensor
from torch.overrides import TorchFunctionMode

_OF_NUMBERS = (torch.tensor, torch.as_tensor)
_AT_PLACES = (Tensor.__getitem__, Tensor.__setitem__)


class Names(TorchFunctionMode):
    """Renames the device wherever one is named."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func is Tensor.pin_memory:
            return pinned(args[0])
        if func is Tensor.cuda:
            return args[0].to(IN_C)
        if func in _OF_NUMBERS and is_pretended(kwargs.get("device")):
            return func(*args, **kwargs | {"device": None}).to(IN_C)
        if func in _AT_PLACES and isinstance(args[0], OnCuda):
            return func(args[0], _listed(args[1]), *args[2:])
        made = func(*map(_in_c, args), **{name: _in_c(each) for name, each in kwargs.items()})
        if isinstance(made, Tensor) and not isinstance(made, OnCuda) and made.is_meta:
            raise RuntimeError(f"{func}: C++ gave no numbers to what it takes for a tensor on meta")
        return made


def _listed(places: Any) -> Any:
    """Places with every list of numbers as a tensor of the host's, as which it is copied."""
    if isinstance(places, tuple):
        return tuple(map(_listed, places))
    return torch.tensor(places) if isinstance(places, list) else places


def _in_c(value: Any) -> Any:
    return IN_C if isinstance(value, torch.device | str) and _is_cuda(value) else value


def _is_cuda(value: torch.device | str) -> bool:
    return str(value).startswith("cuda")
