"""A hook by which `loop.compile` replaces functions of fixed shapes.

Training may compile a part of a computation only if its shapes stay the same from batch to batch. The number of
passes, documents and labels differs in every batch, so the loops over them are not compiled. The parts between are
functions of tensors of a row's shape, called through a `Static`, which modules keep (`StaticParts`) and hand to
nobody: it runs them as they are, or as `trainers/loop/compiled.py` compiles them. Decoding uses `as_it_is` alone. Read
next: `../eagle/net.py`, which has such parts.

A part may also keep its inputs alone, and be computed again when its gradient is: no bit of any number differs,
dropout's random numbers included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar

from torch import nn
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
