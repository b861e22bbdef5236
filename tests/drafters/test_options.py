"""Options of drafters: read by the families that have a use for them, refused for all others, before any training."""

from __future__ import annotations

from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from draftsmith.drafters.config import DrafterConfig, check_options
from draftsmith.drafters.families import FAMILIES
from draftsmith.errors import RequestError
from draftsmith.launch.check.early import named
from draftsmith.launch.check.models import check_recipe
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.requests import Pair
from draftsmith.trainers.methods import METHODS

BLOCKS, EAGLES = {"dflash", "dspark", "dflash2"}, {"eagle", "eagle3", "mtp"}
DRAW = {"draft_model", "pard", "peagle", "ensemble", "quantised", "early_exit", *EAGLES, *BLOCKS}
OPTIONS: list[tuple[dict[str, Any], str, set[str]]] = [
    ({"confidence": 0.5}, "drafter.confidence is 0.5, .* ends no draft by doubt", BLOCKS),
    ({"block.tree": "tree"}, "drafter.block.tree is 'tree', .* no block drafter", BLOCKS),
    ({"block.nodes": 8, "block.tree": "tree"}, "drafter.block.(tree|nodes) is .* no block drafter", BLOCKS),
    ({"block.children": 2, "block.tree": "tree"}, "drafter.block.(tree|children) is .* no block drafter", BLOCKS),
    ({"eagle.tree": "dynamic"}, "drafter.eagle.tree is 'dynamic', .* no tree of EAGLE's", EAGLES),
    ({"eagle.nodes": 8, "eagle.tree": "dynamic"}, "drafter.eagle.(tree|nodes) is .* no tree of EAGLE's", EAGLES),
    ({"eagle.top_k": 3, "eagle.tree": "dynamic"}, "drafter.eagle.(tree|top_k) is .* no tree of EAGLE's", EAGLES),
    ({"medusa.nodes": 8}, "drafter.medusa.nodes is 8, .* no tree of heads", {"medusa", "hydra", "hydra++"}),
    ({"policy": "argmax"}, "drafter.policy is 'argmax', .* always takes its likeliest tokens", DRAW),
]
SIZES = [
    ("dflash", "block.nodes", 3, "block.tree tree"),
    ("dspark", "block.children", 9, "block.tree tree"),
    ("eagle", "eagle.nodes", 8, "eagle.tree dynamic"),
    ("mtp", "eagle.top_k", 3, "eagle.tree dynamic"),
]


def nested(option: dict[str, Any]) -> dict[str, Any]:
    """Values by dotted path, as sections."""
    made: dict[str, Any] = {}
    for path, value in option.items():
        *sections, name = path.split(".")
        reduce(lambda at, section: at.setdefault(section, {}), sections, made)[name] = value
    return made


@pytest.mark.parametrize(("option", "reason", "readers"), OPTIONS)
def test_an_option_is_refused_by_families_that_ignore_it(
    option: dict[str, Any], reason: str, readers: set[str]
) -> None:
    config = DrafterConfig.model_validate(nested(option))
    for family in FAMILIES.values():
        if family.name in readers:
            check_options(family, config, "folder")
        else:
            with pytest.raises(RequestError, match=f"{reason}; leave it out"):
                check_options(family, config, "folder")


@pytest.mark.parametrize(("option", "reason", "readers"), OPTIONS)
def test_it_is_refused_before_training(option: dict[str, Any], reason: str, readers: set[str]) -> None:
    for method in METHODS.values():
        if method.family is None:
            continue
        flags = [(f"drafter.{name}", str(value)) for name, value in option.items()]
        recipe = load_recipe(f"{method.name}-tiny", flags).recipe
        if method.family in readers:
            check_recipe(recipe)
        else:
            with pytest.raises(RequestError, match=reason):
                check_recipe(recipe)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"block.tree": "tree", "temperature_factors": "[1, 0.3]"},
            "temperature_factors are of drawn tokens, and block.tree",
        ),
        (
            {"eagle.tree": "dynamic", "temperature_factors": "[0.5]"},
            "temperature_factors are of drawn tokens, and eagle.t",
        ),
        ({"block.tree": "tree", "confidence": "0.4"}, "confidence ends chains, and block.tree is tree"),
    ],
)
def test_what_contradicts_itself_is_refused_in_the_recipe(values: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_recipe("dflash-tiny", [(f"drafter.{name}", value) for name, value in values.items()])


@pytest.mark.parametrize(("method", "size", "value", "tree"), SIZES)
def test_the_size_of_a_tree_is_refused_where_a_chain_is_drafted(method: str, size: str, value: int, tree: str) -> None:
    flag = (f"drafter.{size}", str(value))
    recipe = load_recipe(f"{method}-tiny", [flag]).recipe
    said = f"drafter.{size} is {value}, read only with drafter.{tree}, and that is 'chain'; add --drafter.{tree}, or leave"
    with pytest.raises(RequestError, match=said):
        check_recipe(recipe)
    with pytest.raises(RequestError, match=said):
        check_options(FAMILIES[method], recipe.drafter, "folder")
    name, shape = tree.split()
    check_recipe(load_recipe(f"{method}-tiny", [flag, (f"drafter.{name}", shape)]).recipe)


@pytest.mark.parametrize("tree", ["chain", "optimised"])
def test_nodes_of_a_default_tree_are_refused_beside_another(tree: str) -> None:
    recipe = load_recipe("medusa-tiny", [("drafter.medusa.nodes", "8"), ("drafter.tree", tree)]).recipe
    with pytest.raises(
        RequestError, match=f"medusa.nodes is 8, read only with drafter.tree default, and that is '{tree}'"
    ):
        check_recipe(recipe)


def test_a_flag_that_turns_a_tree_off_does_away_with_its_sizes(tmp_path: Path) -> None:
    """Those of a recipe; a size that is typed beside it is refused."""
    own = [("drafter.block.tree", "tree"), ("drafter.block.nodes", "9"), ("drafter.block.children", "3")]
    file = tmp_path / "own.yaml"
    file.write_text(load_recipe("dflash-tiny", own).yaml())
    chain = ("drafter.block.tree", "chain")
    recipe = load_recipe(str(file), [chain]).recipe
    assert (recipe.drafter.block.nodes, recipe.drafter.block.children) == (16, 4)
    check_recipe(recipe)
    assert load_recipe(str(file), own[1:2]).recipe.drafter.block.children == 3
    with pytest.raises(RequestError, match="block.nodes is 5, read only with"):
        check_recipe(load_recipe(str(file), [chain, ("drafter.block.nodes", "5")]).recipe)


def test_every_option_has_a_reader() -> None:
    """`vocabulary` is read where a drafter is loaded, `tree` by the families whose `tree_unused` says so."""
    read = frozenset().union(*(family.options for family in FAMILIES.values()))
    assert read == DrafterConfig.model_fields.keys() - {"vocabulary", "tree"}


@pytest.mark.parametrize(
    ("method", "flag", "said"),
    [
        (
            "trained",
            "lookup.tokens",
            "--drafter.lookup.tokens is 3, and --method is trained: prompt-lookup alone reads",
        ),
        ("trained,ngram", "rest.nodes", "rest alone reads it; name rest by --method, or leave it out"),
        ("lookahead", "suffix.depth", "suffix and suffix-hybrid alone read it; name one of them by --method"),
        ("trained", "adaptive.longest", "adaptive-draft alone reads it"),
        (
            "prompt-lookup,suffix",
            "eagle.nodes",
            "--method is prompt-lookup,suffix, which loads no drafter to follow it",
        ),
        ("skeleton-of-thought", "tree", "which loads no drafter"),
    ],
)
def test_a_flag_that_no_method_asked_for_reads_is_refused(method: str, flag: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        named(Pair(None, "tiny", "folder", method), [(f"drafter.{flag}", "3")])


@pytest.mark.parametrize(
    ("method", "flag"),
    [
        ("trained", "eagle.nodes"),
        ("prompt-lookup,trained", "lookup.tokens"),
        ("suffix-hybrid", "suffix.depth"),
        ("suffix-hybrid", "members"),
        ("adaptive-draft", "adaptive.longest"),
        ("trained,lookahead", "tree"),
    ],
)
def test_a_flag_that_one_of_the_methods_reads_is_taken(method: str, flag: str, tmp_path: Path) -> None:
    pair = named(Pair(None, "tiny", str(tmp_path), method), [(f"drafter.{flag}", "3")])
    assert str(attrgetter(flag)(pair.recipe.drafter)) == "3"
