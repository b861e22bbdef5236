"""Parts of a computation whose shapes stay the same from batch to batch, so that training may compile them.

A network's loop over passes, documents and labels does not: their number is another in every batch. What is
between is written as functions of tensors of a row's shape, and called through a `Static`, which modules keep
(`StaticParts`) and hand to nobody: as they are, or as `trainers/loop/compiled.py` makes them. Decoding calls nothing
through it but `as_it_is`. Read next:
`../eagle/net.py`, which has such parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, ParamSpec, Protocol, TypeVar

from torch import nn

P = ParamSpec("P")
T = TypeVar("T")


class Static(Protocol):
    """Gives what is to be called in place of a part."""

    def __call__(self, name: str, part: Callable[P, T], /) -> Callable[P, T]:
        """`name`: what the log calls it; `part`: a function of a module or of a class, the same at every call."""


def as_it_is(_name: str, part: Callable[P, T], /) -> Callable[P, T]:
    """The part itself: a run without `loop.compile`, and all decoding."""
    return part


class StaticParts(nn.Module):
    """A module that calls parts of fixed shape through `static`, which is set once for all such modules within it."""

    compiles: ClassVar[bool] = True
    """Whether its parts may be others than `as_it_is`."""

    @property
    def static(self) -> Static:
        """What its parts are called through."""
        kept: Static = self.__dict__.get("_static", as_it_is)
        return kept

    @static.setter
    def static(self, static: Static) -> None:
        self.__dict__["_static"] = static
        for each in [*self.modules(), *self.frozen_parts()]:
            if isinstance(each, StaticParts) and each is not self:
                each.__dict__["_static"] = static

    def frozen_parts(self) -> Iterable[nn.Module]:
        """Modules that are none of its own, as what is frozen is not, and call through the same."""
        return ()
