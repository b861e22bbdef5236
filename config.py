"""The base of every section of a recipe: strict, frozen, a docstring under every field.

Each room keeps the sections it reads in its own `config.py`; `launch/recipe/load.py` puts them together.
This module must not import torch: `--help`, `ls` and `show` go through it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import reduce
from math import inf
from operator import getitem
from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from .errors import RequestError

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


S = TypeVar("S", bound=Section)


def inner_sections(kind: type[Section]) -> dict[str, type[Section]]:
    """The sections that stand in a section, by name."""
    kinds = {name: info.annotation for name, info in kind.model_fields.items()}
    return {name: each for name, each in kinds.items() if isinstance(each, type) and issubclass(each, Section)}


def _paths(kind: type[Section]) -> dict[str, tuple[str, ...]]:
    """Where the fields stand that have a name in Python."""
    inner = [(name, field) for name, each in inner_sections(kind).items() for field in each.model_fields]
    return {name: (name,) for name in kind.model_fields} | {"_".join(path): path for path in inner}


def changed(section: S, values: Mapping[str, Any]) -> S:
    """The section with some of its fields changed, as Python code gives them by name.

    A field of a section inside is named with it, as `eagle_tree`.

    Raises:
        RequestError: a name that is no field, or a value that it cannot have.
    """
    kind = type(section)
    if not isinstance(section, Section):
        raise RequestError(f"config is {section!r:.60}; expected a section, as EvalConfig(...), or its fields by name")
    paths, made = _paths(kind), section.model_dump()
    for name, value in values.items():
        if name not in paths:
            near = difflib.get_close_matches(name, paths, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(kind.model_fields)}"
            raise RequestError(f"{name} is no field of {kind.__name__}{hint}")
        *sections, field = paths[name]
        reduce(getitem, sections, made)[field] = value
    try:
        return kind.model_validate(made)
    except ValidationError as error:
        found = "\n".join(
            f"  {'.'.join(map(str, each['loc']))}: found {each['input']!r:.80}; {each['msg']}"
            for each in error.errors()
        )
        raise RequestError(f"{kind.__name__} cannot be made with these values:\n{found}") from None
