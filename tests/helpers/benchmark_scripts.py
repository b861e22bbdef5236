"""The scripts of `benchmarks/` and `.ci/` as modules: they are no package, each runs by itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import draftsmith

SCRIPTS = Path(draftsmith.__file__).parent / "benchmarks"
MACHINE = {
    "devices": [],
    "processor": "a processor",
    "cores": 2,
    "threads": 2,
    "memory_gb": 25.0,
    "versions": {"torch": "2.13.0", "deepspeed": None},
}
"""As results name one."""


def load(name: str, folder: Path = SCRIPTS) -> ModuleType:
    """The script of that name, imported."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
