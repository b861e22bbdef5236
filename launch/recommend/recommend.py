"""`draftsmith recommend`: which recipe to copy for a target, what it trains, how long that took, what is published.

By the target's config alone; no weights are read. `recipes.yaml` beside this file says which recipes are made for
which size. Read next: `target.py`, which reads the config; `launch/check/check.py`, the pre-flight, which counts
everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import inf, log
from pathlib import Path
from shlex import quote
from typing import Any

from ...drafters.published.known import KnownDrafter, known_drafters, same_model
from ..check.devices import in_units
from ..recipe.load import headline, load_recipe, shipped_recipes
from ..recipe.model import Recipe
from .target import Described, described

_NEAR = 1.5
"""How many times as large another target may be for a measured rate to be said of it."""
_STATE = 16
"""Bytes of a number that is trained, in fp32: itself, its gradient and two moments."""


@dataclass(frozen=True)
class Made:
    """Recipes that are made for targets of one size, or for one model."""

    shown: str
    recipes: str
    """In the words of the docs."""
    first: tuple[str, ...]
    chats: tuple[str, ...] = ()
    """In their place, for a target with a chat template."""
    ending: str = ""
    """Of the names of all of them."""
    model: str | None = None
    least: float = 0.0
    most: float = inf

    def away(self, parameters: int) -> float:
        """How far a size is outside, as a logarithm; 0 inside."""
        return log(max(1.0, self.least / parameters, parameters / self.most))


@cache
def _rules() -> dict[str, Any]:
    from ruamel.yaml import YAML

    content = (files(__package__) / "recipes.yaml").read_text(encoding="utf-8")
    rules: dict[str, Any] = YAML(typ="safe", pure=True).load(content)
    return rules


def made_for() -> list[Made]:
    """All of `recipes.yaml`, in its order."""
    lists = ("first", "chats")
    return [Made(**row | {name: tuple(row.get(name, ())) for name in lists}) for row in _rules()["targets"]]


def recommend(name: str) -> str:
    """What is said of a target; errors are those of `described`."""
    target = described(name)
    found, how = published(target)
    sized = min((row for row in made_for() if row.model is None), key=lambda row: row.away(target.parameters))
    own = [row for row in made_for() if row.model is not None and any(same_model(row.model, n) for n in target.names)]
    first = (target.chats and sized.chats) or sized.first
    return "\n".join(
        [
            *_of_target(target),
            *(line for row in own for line in (f"recipes for {row.shown} itself:", *_trained(target, row.first))),
            *_of_recipes(target, sized, first),
            *_of_published(found, how, target),
            *_next(target, [*(one for row in own for one in row.first), *first][0]),
        ]
    )


def published(target: Described) -> tuple[list[KnownDrafter], str]:
    """The drafters of the list that are for a target, and by what they were found."""
    for name, where in target.names.items():
        if found := known_drafters(name):
            return found, where
    alike = _of_these_sizes(target)
    return (known_drafters(alike), f"its sizes, which are those of {alike}") if alike else ([], "")


_SIZES = {
    "model_type": "kind",
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocabulary",
}


def _of_these_sizes(target: Described) -> str | None:
    """The only model of known sizes that has those of the target."""
    folder = Path(str(files("draftsmith.recipes"))) / "assets" / "sizes"
    configs = {each.stem: json.loads(each.read_text(encoding="utf-8")) for each in folder.glob("*.json")}
    same = [
        name
        for name, config in configs.items()
        if all(config[theirs] == getattr(target, ours) for theirs, ours in _SIZES.items())
    ]
    return same[0] if len(same) == 1 else None


def _of_target(target: Described) -> Iterator[str]:
    chats = {True: "a chat template", False: "no chat template", None: "whether it has a chat template is not known"}
    context = f", context {target.context:,}" if target.context else ""
    yield (
        f"{target.name}: {target.kind}, {target.parameters / 1e6:,.1f} M parameters, {target.layers} layers of "
        f"{target.hidden:,}, vocabulary {target.vocabulary:,}{context}, {chats[target.chats]}"
    )
    half, full = (in_units(size * target.parameters) for size in (2, 4))
    rounded = f"; its weights are rounded ({target.quantised})" if target.quantised else ""
    yield f"held while a drafter trains: {half} in bf16, {full} in fp32{rounded}"


def _of_recipes(target: Described, sized: Made, first: tuple[str, ...]) -> Iterator[str]:
    note = "" if sized.away(target.parameters) == 0 else "; this target is of another size, so check learning rates"
    yield f"recipes for {sized.shown}, those that end in {sized.ending}{note}:"
    yield from _trained(target, first)
    others = [path for path in shipped_recipes() if path.stem.endswith(sized.ending) and path.stem not in first]
    # one of them makes a target, and no drafter
    yield f"  also {', '.join(path.stem for path in others if headline(path)[0] != 'target')}"
    if target.chats is False:
        yield "  without a chat template it learns from texts and code, or from prompts and completions"


def _trained(target: Described, names: Sequence[str]) -> Iterator[str]:
    """A line for each recipe: what it trains for this target, and how long that took."""
    for name in names:
        recipe = load_recipe(name, []).recipe
        count = recipe.record.numbers(recipe, target)
        size = "`check` counts what it trains"
        if count is not None:
            state = in_units(_STATE * count)
            size = f"trains {count / 1e6:,.2f} M parameters, {state} for weights, gradient and moments"
        yield f"  {name}: {size}; {_hours(recipe, target)}"


def _hours(recipe: Recipe, target: Described) -> str:
    """How long a recipe takes at the rates that were measured for a target of about that size."""
    tokens = recipe.loop.steps * recipe.loop.batch_rows * recipe.row_tokens
    rates = [
        f"{tokens / row['rate'] / 3600:,.1f} h on {row['machine']} ({row['rate']:,} tokens a second, measured)"
        for row in _rules()["measured"]
        if row["recipe"] == recipe.name and abs(log(target.parameters / row["parameters"])) < log(_NEAR)
    ]
    return f"{tokens / 1e6:,.1f} M tokens, {', '.join(rates) or 'time not measured for a target of this size'}"


def _of_published(found: list[KnownDrafter], how: str, target: Described) -> Iterator[str]:
    if not found:
        listed = len(known_drafters())
        names = f" by the name {' or '.join(target.names)}" if target.names else ""
        yield (
            f"published drafters: none found{names} in the shipped list of {listed} (draftsmith ls --drafters); "
            "the hub may have others"
        )
        return
    sizes = "; a model that was trained on from it has the same" if how.startswith("its sizes") else ""
    yield f"published drafters, found by {how}{sizes}:"
    for each in found:
        yield f"  hub:{each.name}: {each.form}, licence {each.licence or 'not stated'}"
    yield f"  none was loaded here: draftsmith inspect-drafter hub:{found[0].name} --target {quote(target.name)}"


def _next(target: Described, first: str) -> Iterator[str]:
    recipe, path = load_recipe(first, []).recipe, quote(target.name)
    same = same_model(recipe.target.path, target.name)
    sizes = "" if same or recipe.target.sizes is None else " --target.sizes null"
    if recipe.data.source != "stdlib":
        yield f"rows: draftsmith generate --source ROWS --target {path} --out answers"
    yield f"next: draftsmith copy {first} my.yaml && draftsmith check my.yaml --target.path {path}{sizes}"
