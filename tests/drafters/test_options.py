"""Options of drafters: read by the families that have a use for them, refused for all others, before any training."""

from __future__ import annotations

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
    ({"block_tree": "tree"}, "drafter.block_tree is 'tree', .* no block drafter", BLOCKS),
    ({"block_nodes": 8, "block_tree": "tree"}, "drafter.block_(tree|nodes) is .* no block drafter", BLOCKS),
    ({"block_children": 2, "block_tree": "tree"}, "drafter.block_(tree|children) is .* no block drafter", BLOCKS),
    ({"eagle_tree": "dynamic"}, "drafter.eagle_tree is 'dynamic', .* no tree of EAGLE's", EAGLES),
    ({"eagle_nodes": 8, "eagle_tree": "dynamic"}, "drafter.eagle_(tree|nodes) is .* no tree of EAGLE's", EAGLES),
    ({"eagle_top_k": 3, "eagle_tree": "dynamic"}, "drafter.eagle_(tree|top_k) is .* no tree of EAGLE's", EAGLES),
    ({"medusa_nodes": 8}, "drafter.medusa_nodes is 8, .* no tree of heads", {"medusa", "hydra", "hydra++"}),
    ({"policy": "argmax"}, "drafter.policy is 'argmax', .* always takes its likeliest tokens", DRAW),
]
SIZES = [
    ("dflash", "block_nodes", 3, "block_tree tree"),
    ("dspark", "block_children", 9, "block_tree tree"),
    ("eagle", "eagle_nodes", 8, "eagle_tree dynamic"),
    ("mtp", "eagle_top_k", 3, "eagle_tree dynamic"),
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
    recipe = load_recipe("medusa-tiny", [("drafter.medusa_nodes", "8"), ("drafter.tree", tree)]).recipe
    with pytest.raises(
        RequestError, match=f"medusa_nodes is 8, read only with drafter.tree default, and that is '{tree}'"
    ):
        check_recipe(recipe)


def test_a_flag_that_turns_a_tree_off_does_away_with_its_sizes(tmp_path: Path) -> None:
    """Those of a recipe; a size that is typed beside it is refused."""
    own = [("drafter.block_tree", "tree"), ("drafter.block_nodes", "9"), ("drafter.block_children", "3")]
    file = tmp_path / "own.yaml"
    file.write_text(load_recipe("dflash-tiny", own).yaml())
    chain = ("drafter.block_tree", "chain")
    recipe = load_recipe(str(file), [chain]).recipe
    assert (recipe.drafter.block_nodes, recipe.drafter.block_children) == (16, 4)
    check_recipe(recipe)
    assert load_recipe(str(file), own[1:2]).recipe.drafter.block_children == 3
    with pytest.raises(RequestError, match="block_nodes is 5, read only with"):
        check_recipe(load_recipe(str(file), [chain, ("drafter.block_nodes", "5")]).recipe)


def test_every_option_has_a_reader() -> None:
    """`vocabulary` is read where a drafter is loaded, `tree` by the families whose `tree_unused` says so."""
    read = frozenset().union(*(family.options for family in FAMILIES.values()))
    assert read == DrafterConfig.model_fields.keys() - {"vocabulary", "tree"}


@pytest.mark.parametrize(
    ("method", "flag", "said"),
    [
        (
            "trained",
            "lookup_tokens",
            "--drafter.lookup_tokens is 3, and --method is trained: prompt-lookup alone reads",
        ),
        ("trained,ngram", "rest_nodes", "rest alone reads it; name rest by --method, or leave it out"),
        ("lookahead", "suffix_depth", "suffix and suffix-hybrid alone read it; name one of them by --method"),
        ("trained", "adaptive_longest", "adaptive-draft alone reads it"),
        (
            "prompt-lookup,suffix",
            "eagle_nodes",
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
        ("trained", "eagle_nodes"),
        ("prompt-lookup,trained", "lookup_tokens"),
        ("suffix-hybrid", "suffix_depth"),
        ("suffix-hybrid", "members"),
        ("adaptive-draft", "adaptive_longest"),
        ("trained,lookahead", "tree"),
    ],
)
def test_a_flag_that_one_of_the_methods_reads_is_taken(method: str, flag: str, tmp_path: Path) -> None:
    pair = named(Pair(None, "tiny", str(tmp_path), method), [(f"drafter.{flag}", "3")])
    assert str(getattr(pair.recipe.drafter, flag)) == "3"
