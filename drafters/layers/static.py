"""Parts of a computation whose shapes stay the same from batch to batch, so that training may compile them.

A network's loop over passes, documents and labels does not: their number is another in every batch. What is
between is written as functions of tensors of a row's shape, and called through a `Static`: as they are, or as
`trainers/loop/compiled.py` makes them. Decoding calls nothing through it but `as_it_is`. Read next:
`../eagle/net.py`, which has such parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Static(Protocol):
    """Gives what is to be called in place of a part."""

    def __call__(self, name: str, part: Callable[P, T], /) -> Callable[P, T]:
        """`name`: what the log calls it; `part`: a function of a module or of a class, the same at every call."""


def as_it_is(_name: str, part: Callable[P, T], /) -> Callable[P, T]:
    """The part itself: a run without `loop.compile`, and all decoding."""
    return part
