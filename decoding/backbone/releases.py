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
    # without a mask of its own a prompt's tokens see those behind them
    "doge": Version("5.23")
}
"""Families of which older releases compute other numbers, by the first release that was tested to be right."""


def check_release(config: Any) -> None:
    """Raise EnvironmentFailure where the installed release computes a family wrongly."""
    family = config.get_text_config(decoder=True).model_type
    needed, found = _RIGHT_FROM.get(family), Version(metadata.version("transformers"))
    if needed is not None and found < needed:
        raise EnvironmentFailure(
            f"transformers {found} computes models of type {family} wrongly, without a word: a prompt's tokens "
            f"see those behind them; pip install 'transformers>={needed}'"
        )


def keep_soft_cap(model: Any) -> None:
    """Let a model whose scores are capped compute them by its own function: older releases give SDPA no cap."""
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    if capped and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(OWN)
