"""The schema of a recipe: what trainers read of it, the sections that the methods' records name, and what the commands
behind a run read.

No torch here. Read next: `load.py`, which reads recipes; `trainers/recipe.py`, `trainers/methods.py`, the records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from ...config import Section
from ...drafters.config import DrafterConfig
from ...eval.config import AuditConfig, EvalConfig
from ...trainers.methods import METHODS, own_sections
from ...trainers.recipe import TrainingRecipe
from .identity import identity_of


class _Recipe(TrainingRecipe):
    """A whole run: the resolved recipe alone repeats it."""

    drafter: DrafterConfig = Field(default_factory=DrafterConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    audit: AuditConfig = Field(default_factory=AuditConfig)

    @property
    def identity(self) -> dict[str, Any]:
        """What the run computes hangs on, by dotted path: its checkpoints carry it."""
        return identity_of(self, self)


def _of_the_records() -> dict[str, Any]:
    """The choice of methods, and the sections of their own."""
    choices = "; ".join(f"`{method.name}` {method.summary}" for method in METHODS.values())
    own = {name: (kind, Field(default_factory=kind)) for name, kind in own_sections().items()}
    return {"method": (Literal[tuple(METHODS)], Field(description=f"What is trained: {choices}.")), **own}


if TYPE_CHECKING:
    Recipe = _Recipe
else:
    Recipe = create_model("Recipe", __base__=_Recipe, __doc__=_Recipe.__doc__, **_of_the_records())


def rebuild() -> None:
    """Make the recipe anew of the records that there are now: the class stays, and whoever holds it knows them."""
    own: dict[str, FieldInfo] = {}
    for name, made in _of_the_records().items():
        if isinstance(made, tuple):
            kind, made = made
            own[name] = FieldInfo.from_annotated_attribute(kind, made)
    fields: dict[str, FieldInfo] = Recipe.model_fields
    for name in set(fields) - set(_Recipe.model_fields) - set(own):
        del fields[name]
    fields.update(own)
    Recipe.model_rebuild(force=True)


def section_of(name: str) -> type[Section] | None:
    """The class of a section of recipes; None for a value beside the sections."""
    kind = Recipe.model_fields[name].annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None
