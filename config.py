"""The base of every section of a recipe: strict, frozen, a docstring under every field.

Each room keeps the sections it reads in its own `config.py`; `launch/recipe/load.py` puts them together.
This module must not import torch: `--help`, `ls` and `show` go through it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A recipe section: unknown keys are errors, values cannot change after validation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        defer_build=True,  # a validator per section at import would double the time of `--help`
    )
