"""A tensor that says it lies on cuda:0, and holds its numbers on the CPU.

For C++ it lies on `meta`: autograd has no worker for a CUDA device that is not there, and runs what lies on `meta` in
the calling thread. So wherever C++ hands on the device of such a tensor it says `meta`, and a tensor that really is on
`meta` cannot be told apart. Read next: `device.py`, which runs operations on what is held.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CUDA = torch.device("cuda:0")
IN_C = torch.device("meta")
"""Where C++ takes the pretended device to be."""


class OnCuda(Tensor):
    """What an operation of the pretended device returns; operations are given what it holds."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnCuda:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "layout": held.layout}
        made = Tensor._make_wrapper_subclass(cls, held.size(), **layout, dtype=held.dtype, device=IN_C)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a tensor on the pretended device, which is closed")

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_meta(self) -> bool:
        return False

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: OnCuda) -> None:
        Tensor.data.__set__(self, value)
        self.held = value.held

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = self.detach().clone()
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __repr__(self, **_kwargs: Any) -> str:
        return f"OnCuda({self.held!r})"


def is_pretended(device: Any) -> bool:
    """Whether a value names the pretended device, as Python or as C++ calls it."""
    return isinstance(device, torch.device | str) and torch.device(device).type in (CUDA.type, IN_C.type)


def held(tensor: Tensor) -> Tensor:
    """What an operation on the CPU is given in place of a tensor."""
    return tensor.held if isinstance(tensor, OnCuda) else tensor
