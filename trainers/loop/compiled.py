"""`loop.compile`: the parts of an objective whose shapes stay the same, through torch.compile.

What is compiled is what an objective's module calls through its `static` (`drafters/layers/static.py`): functions, not
modules, so that weights, their names, checkpoints and decoding stay what they are. Each part is taken whole
or not at all: torch never falls back to Python without a word. Shapes are static; where the number of labels
differs from batch to batch, few sizes are made of it (`../losses/buckets.py`). Read next: `loop.py`, which
asks for it; `../losses/chunked.py` and `drafters/eagle/net.py`, what is compiled.
"""

from __future__ import annotations

import logging
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from ...drafters.layers.static import StaticParts
from ...errors import RequestError
from ..config import LoopConfig
from ..methods import METHODS

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)

BACKEND = "inductor"
"""torch's own compiler."""
_LIMIT = 256
"""Graphs of one part. Past it torch gives up with an error; what a run needs is a few dozen at most."""


class Compiled:
    """A `Static` that compiles each part when it is first called, and again for each further shape."""

    def __init__(self, backend: str | None = None) -> None:
        """`backend`: a name that torch.compile knows; None: `BACKEND`."""
        self._name = BACKEND if backend is None else backend
        self._backend = torch._dynamo.lookup_backend(self._name)
        self.graphs: Counter[str] = Counter()
        """How often each part was compiled: for a shape, with a gradient or without."""
        self._made: dict[Any, Callable[..., Any]] = {}
        self._told = 0

    def __call__(self, name: str, part: Callable[P, T]) -> Callable[P, T]:
        if (name, part) not in self._made:
            self._made[name, part] = self._compiled(name, part)
        return self._made[name, part]

    def _compiled(self, name: str, part: Callable[P, T]) -> Callable[P, T]:
        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            self.graphs[name] += 1
            return self._backend(graph, inputs, **self._options())

        # `fullgraph`: an error where torch would run a piece of it as it is
        whole = torch.compile(part, fullgraph=True, dynamic=False, backend=backend)

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                with _settings():
                    return whole(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise RequestError(
                    f"loop.compile is on, and torch.compile cannot take {name}: {_first_line(error)}. Leave "
                    "loop.compile out; nothing was left uncompiled without a word"
                ) from error

        return run

    def _options(self) -> dict[str, Any]:
        if self._name != "inductor":
            return {}
        # dropout and noise as they are without: the same numbers from the same seed
        return {"config_patches": {"fallback_random": True}}

    def tell(self) -> None:
        """Say in the log what was compiled so far, where that is more than was said."""
        count = self.graphs.total()
        if count > self._told:
            each = ", ".join(f"{name} {times}" for name, times in sorted(self.graphs.items()))
            _log.info("compiled %d graphs so far: %s", count, each)
            self._told = count


def _settings() -> Any:
    """torch's own settings while a part is called, and perhaps compiled."""
    return torch._dynamo.config.patch(
        recompile_limit=_LIMIT,
        accumulated_recompile_limit=16 * _LIMIT,  # of all runs in this process
        # DDP's buckets are outside of the parts: gradients are added up as each is made
        optimize_ddp=False,
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300].rstrip(".")


def compile_parts(module: nn.Module, loop: LoopConfig) -> Compiled | None:
    """Have an objective's module compile its parts, where the recipe asks for it.

    Raises:
        RequestError: the module has none.
    """
    if not loop.compile:
        return None
    if not (isinstance(module, StaticParts) and module.compiles):
        able = ", ".join(name for name, method in METHODS.items() if method.compiles)
        raise RequestError(
            f"loop.compile is on, and this method has no parts that are compiled; methods {able} have. Leave it out"
        )
    compiled = Compiled()
    module.static = compiled
    return compiled


def check_compiler(loop: LoopConfig, *, on_cpu: bool) -> None:
    """Raise RequestError where the recipe asks for torch.compile and this machine lacks what that needs."""
    if not loop.compile:
        return
    missing = _missing_for_cpu() if on_cpu else _missing_for_gpu()
    if missing is not None:
        raise RequestError(f"loop.compile is on, and {missing}; or leave loop.compile out")


def _missing_for_cpu() -> str | None:
    from torch._inductor import config, cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        tried = ", ".join(str(name) for name in _compilers(config.cpp.cxx) if name)
        return (
            f"torch.compile needs a C++ compiler on a CPU: none of {tried} runs here. Install g++ 10 or newer "
            "(package g++ of Debian and Ubuntu), or name another by the variable CXX"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return (
            f"torch.compile needs Python's own headers on a CPU: {header} is missing. Install them (package "
            "python3-dev of Debian and Ubuntu)"
        )
    return None


def _compilers(names: Any) -> tuple[Any, ...]:
    return tuple(names) if isinstance(names, list | tuple) else (names,)


def _missing_for_gpu() -> str | None:
    from torch.utils._triton import has_triton

    if has_triton():
        return None
    return (
        "torch.compile needs Triton on a GPU, which is not installed or does not know this one (compute capability "
        "7.0 and newer): pip install triton, in the version that this torch names"
    )


def check_no_deepspeed(loop: LoopConfig) -> None:
    """Raise RequestError for torch.compile under DeepSpeed."""
    if loop.compile:
        raise RequestError(
            "loop.compile is on, and DeepSpeed holds the weights: under ZeRO they are cut and put together while a "
            "part runs, which no graph can hold. Leave loop.compile out, or launch with launch/configs/ddp.yaml"
        )
