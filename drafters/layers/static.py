"""A hook by which `loop.compile` replaces functions of fixed shapes.

Training may compile a part of a computation only if its shapes stay the same from batch to batch. The number of
passes, documents and labels differs in every batch, so the loops over them are not compiled. The parts between are
functions of tensors of a row's shape, called through a `Static`, which runs them as they are or as
`trainers/student/compiled.py` compiles them. Decoding uses `as_it_is` alone. Read next: `../eagle/net.py`, which has
such parts.
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
