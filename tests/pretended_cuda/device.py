"""The pretended device: every operation of this process, run on the CPU, refused or noted as CUDA would have it.

Read next: `patches.py`, which opens it.
"""

from __future__ import annotations

import traceback
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from helpers.pretended_device import Place, nearest
from pretended_cuda.call import Call
from pretended_cuda.refusals import refuse
from pretended_cuda.waits import pinned, wait_of
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from pretended_cuda.graphs import Graph

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class PretendedCuda(TorchDispatchMode):
    """Notes, for every function of the package, by what it made the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[Place, set[str]] = {}
        self.graph: Graph | None = None
        """The one that is recorded."""
        self.tells = 0
        """Whether a wait is told: `torch.cuda.set_sync_debug_mode`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _is_compound(func):
            with self:
                return func.decompose(*args, **kwargs)
        call = Call(func, args, kwargs)
        refuse(call)
        if (wait := wait_of(call)) is not None:
            self._note(wait)
        made = call.wrap(call.run())
        if self.graph is not None:
            self.graph.note(call, made)
        return pinned(made) if kwargs.get("pin_memory") else made

    def _note(self, wait: str) -> None:
        if self.graph is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing ({wait})")
        self.waits.setdefault(nearest(), set()).add(wait)
        if self.tells:
            warnings.warn_explicit(f"called a synchronizing CUDA operation ({wait})", UserWarning, *_caller())


def _caller() -> tuple[str, int]:
    """File and line of the innermost Python that is neither torch's nor this folder's."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    return next((file, line) for file, line in frames if not file.startswith(_OWN))


@cache
def _is_compound(func: Any) -> bool:
    """Whether an operation is written as others, which CUDA is asked for; in inference mode it comes here whole."""
    return func._can_decompose()
