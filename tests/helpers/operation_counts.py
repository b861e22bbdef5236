"""Work by counting: the numbers that operations write, and the calls of functions on the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Numbers(TorchDispatchMode):
    """Counts the numbers that operations write; views write none."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.written += each.numel()
        return out


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that was made."""

    numbers = 0

    def __torch_dispatch__(self, call: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = call(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return made


def calls_of(action: Callable[[], object]) -> int:
    """Calls of functions, of Python and C, that an action makes."""
    count = 0

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


class Launches(TorchDispatchMode):
    """Counts the operations that write numbers: on a GPU each is a launch at least. Views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        in_place = func._schema.is_mutable
        self.number += in_place or any(each.untyped_storage().data_ptr() not in given for each in made)
        return out
