"""A part of a network that keeps its inputs alone, and is computed again when its gradient is.

No bit of any number differs, dropout's random numbers included. Read next: `../eagle/net.py`, `../eagle/peagle.py` and
`../block/net.py`, which have such parts; `trainers/student/recomputed.py`, layers of `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


def again(part: Callable[..., T], recompute: bool) -> Callable[..., T]:
    """`part`; with `recompute`, wrapped so that only its inputs are kept until the backward pass."""
    if not recompute:
        return part

    def run(*given: Any) -> T:
        made: T = checkpoint(part, *given, use_reentrant=False)
        return made

    return run
