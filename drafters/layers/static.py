"""Parts of a computation whose shapes stay the same from batch to batch, so that training may compile them.

A network's loop over passes, documents and labels does not: their number is another in every batch. What is
between is written as functions of tensors of a row's shape, and called through a `Static`: as they are, or as
`trainers/student/compiled.py` makes them. Decoding calls nothing through it but `as_it_is`. Read next:
`../eagle/net.py`, which has such parts.

A part may also keep its inputs alone, and be computed again when its gradient is: no bit of any number differs,
dropout's random numbers included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from torch.utils.checkpoint import checkpoint

P = ParamSpec("P")
T = TypeVar("T")


class Static(Protocol):
    """Gives what is to be called in place of a part."""

    def __call__(self, name: str, part: Callable[P, T], /) -> Callable[P, T]:
        """`name`: what the log calls it; `part`: a function of a module or of a class, the same at every call."""


def as_it_is(_name: str, part: Callable[P, T], /) -> Callable[P, T]:
    """The part itself: a run without `loop.compile`, and all decoding."""
    return part


def again(part: Callable[..., T], recompute: bool) -> Callable[..., T]:
    """`part`; with `recompute`, wrapped so that only its inputs are kept until the backward pass."""
    if not recompute:
        return part

    def run(*given: Any) -> T:
        made: T = checkpoint(part, *given, use_reentrant=False)
        return made

    return run
