"""The base of every section of a recipe: strict, frozen, a docstring under every field.

Each room keeps the sections it reads in its own `config.py`; `launch/recipe/load.py` puts them together.
This module must not import torch: `--help`, `ls` and `show` go through it.
"""

from __future__ import annotations

from math import inf

from pydantic import AfterValidator, BaseModel, ConfigDict

LEAST_TEMPERATURE = 1e-4
"""Above 0: so far below it that the smallest factor of a draft's temperature fits, logits leave the range of fp32."""


def is_temperature(value: float) -> bool:
    """Whether it is 0, the argmax, or one that logits can be divided by."""
    return value == 0 or LEAST_TEMPERATURE <= value < inf


def _temperature(value: float) -> float:
    if not is_temperature(value):
        raise ValueError(f"expected 0, or at least {LEAST_TEMPERATURE:g}")
    return value


DIVIDES = AfterValidator(_temperature)
"""On a field of a temperature, behind its bounds."""


class Section(BaseModel):
    """A recipe section: unknown keys are errors, values cannot change after validation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        defer_build=True,  # a validator per section at import would double the time of `--help`
    )
