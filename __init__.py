"""draftsmith: train, prove and ship drafters for speculative decoding.

The repository root is this package. Names below are handed out lazily, so that importing the
package does not import torch. Read next: docs/design.md, then launch/cli.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0.dev0"

# public name -> module that owns it
_HOMES = {
    "train": "launch.train",
    "load_recipe": "launch.recipe.load",
    "generate": "decoding.engine",
    "autoregressive": "decoding.engine",
    "load_target": "decoding.backbone.loading",
    "Warper": "decoding.sampling",
    "load_drafter": "drafters.registry",
    "evaluate": "eval.measure.evaluate",
    "audit": "eval.audit.audit",
}
__all__ = ["__version__", *_HOMES]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"draftsmith has no public name {name!r}")
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
