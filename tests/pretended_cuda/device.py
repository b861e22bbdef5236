"""The pretended device: every operation of this process, run on the CPU, refused or noted as CUDA would have it.

Read next: `patches.py`, which opens it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pretended_cuda.call import Call
from pretended_cuda.refusals import refuse
from pretended_cuda.waits import pinned, wait_of
from pretended_device import Place, nearest
from torch.utils._python_dispatch import TorchDispatchMode


class PretendedCuda(TorchDispatchMode):
    """Notes, for every function of the package, by what it made the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[Place, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _is_compound(func):
            with self:
                return func.decompose(*args, **kwargs)
        call = Call(func, args, kwargs)
        refuse(call)
        if (wait := wait_of(call)) is not None:
            self.waits.setdefault(nearest(), set()).add(wait)
        made = call.wrap(call.run())
        return pinned(made) if kwargs.get("pin_memory") else made


@cache
def _is_compound(func: Any) -> bool:
    """Whether an operation is written as others, which CUDA is asked for; in inference mode it comes here whole."""
    return func._can_decompose()
