"""A list on the command line is one value, values with commas, or YAML's brackets, for every list that there is."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from draftsmith.errors import RequestError
from draftsmith.launch import requests
from draftsmith.launch.recipe.load import field_paths, load_recipe
from draftsmith.launch.recipe.model import Recipe
from draftsmith.launch.recipe.values import split_overrides
from draftsmith.launch.requests import EvalRequest


def value_of(path: str, text: str) -> Any:
    value: Any = load_recipe("boost-tiny", [(path, text)]).recipe
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("eval.temperatures", "0", [0.0]),
        ("eval.temperatures", "0,1", [0.0, 1.0]),
        ("eval.temperatures", "0, 0.5", [0.0, 0.5]),
        ("eval.temperatures", "[0, 1]", [0.0, 1.0]),
        ("eval.sweep", "[]", []),
        ("loop.trackers", "tensorboard", ["tensorboard"]),
        ("optimizer.betas", "0.9,0.99", (0.9, 0.99)),
        ("boost.layers", "2,null", [2, None]),
        ("model.keep_layers", "null", None),
        ("data.source", "a,b", "a,b"),
    ],
)
def test_a_list_is_read(path: str, text: str, value: Any) -> None:
    assert value_of(path, text) == value


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("eval.temperatures", "hot", "eval.temperatures.0 .*found 'hot'; input should be a valid number"),
        ("eval.temperatures", "0,,1", "eval.temperatures.1 .*found None; input should be a valid number"),
        ("optimizer.betas", "0.9", r"found \[0.9\]; expected 2 numbers"),
    ],
)
def test_a_wrong_value_in_a_list_is_named(path: str, text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        value_of(path, text)


def lists() -> list[str]:
    """Every field of a recipe that may be a list."""
    found = []
    for path in field_paths():
        *sections, name = path.split(".")
        model: Any = Recipe
        for section in sections:
            model = model.model_fields[section].annotation
        kind = model.model_fields[name].annotation
        if {list, tuple} & {get_origin(each) for each in (kind, *get_args(kind))}:
            found.append(path)
    return found


def said_of(path: str, text: str) -> str:
    """What is wrong with a value; empty if nothing is."""
    try:
        load_recipe("boost-tiny", [(path, text)])
    except RequestError as error:
        return str(error)
    return ""


def test_no_list_asks_for_brackets() -> None:
    found = lists()
    assert {"eval.temperatures", "eval.sweep", "optimizer.betas", "eagle3.layers"} <= set(found)
    for path in found:
        for text in ("1", "1,2", "word"):
            assert "valid array" not in said_of(path, text)


def test_lists_of_the_verbs_take_commas_too() -> None:
    given = ["--concurrency", "1,4", "8", "--rate=0.5,1", "--eval.temperatures", "0", "run"]
    rest, overrides = split_overrides(given, of=EvalRequest)
    assert rest == ["--concurrency", "1", "4", "8", "--rate", "0.5", "1", "run"]
    assert overrides == [("eval.temperatures", "0")]
    assert split_overrides(["a,b", "--concurrency", "3"], of=EvalRequest)[0] == ["a,b", "--concurrency", "3"]


def test_every_list_of_a_verb_is_one_of_a_tuple() -> None:
    """Which is how they are found; positional ones are words without commas."""
    kinds = [
        kind for kind in vars(requests).values() if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__")
    ]
    hints = [get_type_hints(kind)[each.name] for kind in kinds for each in fields(kind)]
    assert not [hint for hint in hints if get_origin(hint) in (list, set)]
