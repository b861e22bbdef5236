"""Options of drafters: read by the families that have a use for them, refused for all others, before any training."""

from __future__ import annotations

from typing import Any

import pytest
from draftsmith.drafters.config import DrafterConfig, check_options
from draftsmith.drafters.families import FAMILIES
from draftsmith.errors import RequestError
from draftsmith.launch.check.models import check_recipe
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers.methods import METHODS

BLOCKS, EAGLES = {"dflash", "dspark", "dflash2"}, {"eagle", "eagle3", "mtp"}
OPTIONS: list[tuple[dict[str, Any], str, set[str]]] = [
    ({"confidence": 0.5}, "drafter.confidence is 0.5, .* ends no draft by doubt", BLOCKS),
    ({"block_tree": "tree"}, "drafter.block_tree is 'tree', .* no block drafter", BLOCKS),
    ({"block_nodes": 8}, "drafter.block_nodes is 8, .* no block drafter", BLOCKS),
    ({"block_children": 2}, "drafter.block_children is 2, .* no block drafter", BLOCKS),
    ({"eagle_tree": "dynamic"}, "drafter.eagle_tree is 'dynamic', .* no tree of EAGLE's", EAGLES),
    ({"eagle_nodes": 8}, "drafter.eagle_nodes is 8, .* no tree of EAGLE's", EAGLES),
    ({"eagle_top_k": 3}, "drafter.eagle_top_k is 3, .* no tree of EAGLE's", EAGLES),
    ({"medusa_nodes": 8}, "drafter.medusa_nodes is 8, .* no tree of heads", {"medusa", "hydra", "hydra++"}),
]


@pytest.mark.parametrize(("option", "reason", "readers"), OPTIONS)
def test_an_option_is_refused_by_families_that_ignore_it(
    option: dict[str, Any], reason: str, readers: set[str]
) -> None:
    config = DrafterConfig(**option)
    for family in FAMILIES.values():
        if family.name in readers:
            check_options(family, config, "folder")
        else:
            with pytest.raises(RequestError, match=f"{reason}; leave it out"):
                check_options(family, config, "folder")


@pytest.mark.parametrize(("option", "reason", "readers"), OPTIONS)
def test_it_is_refused_before_training(option: dict[str, Any], reason: str, readers: set[str]) -> None:
    ((name, value),) = option.items()
    for method in METHODS.values():
        if method.family is None:
            continue
        recipe = load_recipe(f"{method.name}-tiny", [(f"drafter.{name}", str(value))]).recipe
        if method.family in readers:
            check_recipe(recipe)
        else:
            with pytest.raises(RequestError, match=reason):
                check_recipe(recipe)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"block_tree": "tree", "temperature_factors": "[1, 0.3]"},
            "temperature_factors are of drawn tokens, and block_tree",
        ),
        (
            {"eagle_tree": "dynamic", "temperature_factors": "[0.5]"},
            "temperature_factors are of drawn tokens, and eagle_t",
        ),
        ({"block_tree": "tree", "confidence": "0.4"}, "confidence ends chains, and block_tree is tree"),
    ],
)
def test_what_contradicts_itself_is_refused_in_the_recipe(values: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_recipe("dflash-tiny", [(f"drafter.{name}", value) for name, value in values.items()])
