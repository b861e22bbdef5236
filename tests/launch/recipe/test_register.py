"""A family and a method are registered in a running process, whose recipes know them from then on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import draftsmith
import pytest
from draftsmith.config import Section
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.record import function
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.load import field_paths, forget_fields
from draftsmith.launch.recipe.model import Recipe, rebuild
from draftsmith.launch.recipe.schema import recipe_schema
from draftsmith.trainers.methods import METHODS


class TarotConfig(Section):
    """Cards."""

    cards: int = 3
    """Cards that are drawn."""


FAMILY = replace(FAMILIES["prompt-lookup"], name="tarot", title="tarot")
METHOD = draftsmith.Method(
    "tarot", "cards", "tarot", module=sys.modules[__name__], sections={"tarot": TarotConfig}, reads=("target",)
)


@pytest.fixture
def unregistered() -> Iterator[None]:
    """What a test registers is gone behind it."""
    yield
    for records in (FAMILIES, METHODS):
        records.pop("tarot", None)
    rebuild()
    forget_fields()


@pytest.mark.usefixtures("unregistered")
def test_recipes_know_a_method_that_is_registered_after_they_were_made() -> None:
    made = draftsmith.load_recipe({"method": "medusa"}).recipe
    with pytest.raises(RequestError, match="method .the given recipe.: found 'tarot'"):
        draftsmith.load_recipe({"method": "tarot"})
    draftsmith.register(FAMILY, METHOD)
    found = draftsmith.load_recipe({"method": "tarot", "tarot": {"cards": 5}}, [("tarot.cards", "7")]).recipe
    assert type(found) is type(made) is Recipe
    assert found.tarot.cards == 7
    assert found.record is METHOD
    assert METHOD.code() is sys.modules[__name__]
    assert function(len) is len
    assert "tarot.cards" in field_paths()
    assert "tarot" in recipe_schema()["properties"]
    with pytest.raises(RequestError, match="tarot.card .*unknown key; did you mean 'tarot.cards'"):
        draftsmith.load_recipe({"method": "tarot", "tarot": {"card": 5}})
    # a cell that runs again
    draftsmith.register(FAMILY, replace(METHOD, summary="other cards"))
    assert draftsmith.load_recipe({"method": "tarot"}).recipe.record.summary == "other cards"


def test_what_is_gone_is_unknown_again() -> None:
    """The fixture of the test above leaves nothing."""
    assert "tarot.cards" not in field_paths()
    with pytest.raises(RequestError, match="found 'tarot'"):
        draftsmith.load_recipe({"method": "tarot"})


@pytest.mark.parametrize(
    ("family", "method", "said"),
    [
        (FAMILIES["eagle"], None, "'eagle' is a family or method of the package"),
        (None, replace(METHOD, name="medusa"), "'medusa' is a family or method of the package"),
        (None, METHOD, "trains family 'tarot', which is not known"),
        (METHOD, None, "family is Method.*; expected a draftsmith.Family, as register"),
        (None, "tarot", "method is 'tarot'; expected a draftsmith.Method"),
        (None, None, "nothing to register; expected a family, a method, or both"),
        (
            FAMILY,
            replace(METHOD, sections={"loop": TarotConfig}),
            "'loop' of method 'tarot' is one of all methods already",
        ),
        (FAMILY, replace(METHOD, sections={"bpd": TarotConfig}), "'bpd' of method 'tarot' is one of bpd already"),
    ],
)
@pytest.mark.usefixtures("unregistered")
def test_a_record_that_cannot_be_is_refused(
    family: draftsmith.Family | None, method: draftsmith.Method | None, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        draftsmith.register(family, method)
    assert "tarot" not in {*FAMILIES, *METHODS}
