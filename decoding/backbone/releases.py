"""What older releases of `transformers` silently compute wrongly: corrected here, or refused.

A wrong number cannot be seen by its size. So this file lists what releases that pyproject.toml allows are known to get
wrong, with the first release that was tested to be right. Read next: `loading.py`, which asks.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from packaging.version import Version

from ...errors import EnvironmentFailure
from .attention import OWN

_RIGHT_FROM = {
    "doge": (Version("5.23"), "without a word: a prompt's tokens see those behind them"),
    "olmo_hybrid": (Version("5.23"), "or not at all: its layers look for their states in a cache that has none"),
}
"""Families that older releases compute otherwise: the first release that was tested to be right, and what is wrong."""


def check_release(config: Any) -> None:
    """Raise EnvironmentFailure where the installed release computes a family wrongly."""
    family = config.get_text_config(decoder=True).model_type
    if family not in _RIGHT_FROM:
        return
    found, (needed, wrong) = Version(metadata.version("transformers")), _RIGHT_FROM[family]
    if found < needed:
        raise EnvironmentFailure(
            f"transformers {found} computes models of type {family} wrongly, {wrong}; "
            f"pip install 'transformers>={needed}'"
        )


def keep_soft_cap(model: Any) -> None:
    """Let a model whose scores are capped compute them by its own function: older releases give SDPA no cap."""
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    if capped and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(OWN)
