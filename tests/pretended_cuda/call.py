"""One call of an operation of ATen: its tensors, where they lie, where its result is to lie.

There are thousands of them in a short text: what is slow here is slow everywhere. Read next: `refusals.py` and
`waits.py`, which judge it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from pretended_cuda.tensor import OnCuda, held, is_pretended
from torch import Tensor

COPIES = ("_to_copy", "copy_")
"""From one device to another; every other operation works on one."""


class Call:
    """An operation with its arguments."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name: str = func.overloadpacket.__name__

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All of them, those in lists too."""
        found: list[Tensor] = []
        _mapped(found.append, (self.args, self.kwargs))
        return found

    @cached_property
    def on_cuda(self) -> list[OnCuda]:
        return [each for each in self.tensors if isinstance(each, OnCuda)]

    @cached_property
    def on_cpu(self) -> list[Tensor]:
        return [each for each in self.tensors if not isinstance(each, OnCuda)]

    @cached_property
    def indices(self) -> list[Tensor]:
        """The tensors that it indexes with; those of `gather` and its like are not meant."""
        return [each for each in self.args[1] if each is not None] if self.indexes else []

    @property
    def indexes(self) -> bool:
        return self.name.lstrip("_").startswith(("index_put", "unsafe_index")) or self.name == "index"

    @cached_property
    def to_cuda(self) -> bool:
        """Whether what it makes lies on the pretended device.

        A number that is written to some places of a tensor is made by `scalar_tensor`, on the CPU for CUDA too.
        """
        if self.name == "scalar_tensor":
            return False
        device = self.kwargs.get("device")
        return bool(self.on_cuda) if device is None else is_pretended(device)

    def run(self) -> Any:
        """Its result on the CPU, which for a tensor that it was given is what that holds."""
        args, kwargs = _mapped(held, (self.args, self.kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return self.func(*args, **kwargs)

    def wrap(self, result: Any) -> Any:
        """The result where it is to lie: a tensor that it was given as that very one."""
        given = {id(held(each)): each for each in self.tensors}
        to_cuda = self.to_cuda

        def wrapped(each: Tensor) -> Tensor:
            return given[id(each)] if id(each) in given else OnCuda(each) if to_cuda else each

        if self.func.is_view and not self.args[0].is_inference():  # so is its view, in inference mode too
            with torch.inference_mode(False):
                return _mapped(wrapped, result)
        return _mapped(wrapped, result)


def _mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Every tensor of what operations take and return in place of which stands another; torch's `tree_map` is slow."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):  # noqa: UP038 - the union takes twice the time
        return type(value)([_mapped(change, each) for each in value])
    if isinstance(value, dict):
        return {name: _mapped(change, each) for name, each in value.items()}
    return value
