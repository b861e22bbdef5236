"""The recipe section that drafters read, and what of it each family has a use for. No torch here.

Read next: `families.py`, whose records name what they read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from ..config import Section
from ..errors import RequestError
from .temperatures import Policy

if TYPE_CHECKING:
    from .record import Family

DEFAULT_TREE = "default"
OPTIMISED_TREE = "optimised"
CHAIN_TREE = "chain"
BY_AUTO = "config=DrafterConfig(vocabulary='auto') in Python, on the command line by --drafter.vocabulary auto"
"""How a draft model of another tokenizer is allowed."""
BRANCHING = {"eagle_tree": "dynamic", "block_tree": "tree"}
"""Shapes of a draft that are trees of the likeliest tokens, by the option that chooses them."""
LEAST_FACTOR = 0.05
"""Of a draft temperature that is not 0."""


class DrafterConfig(Section):
    """How drafters propose: a draft model, and those that need no training."""

    policy: Policy = "sample"
    """At temperature > 0: draw from the draft's warped distribution, or take its argmax (a point mass)."""
    temperature_factors: list[Annotated[float, Field(ge=0, le=20)]] = []
    """Temperature of drafting over that of decoding: of the first drafted token, the second, ...; deeper ones take
    the last. Empty: 1; 0: the likeliest token. No value changes the output; a draft that is too sure of itself is
    accepted more when it is hotter. `draftsmith tune` chooses them."""
    confidence: float = Field(0.0, ge=0, lt=1)
    """A block drafter ends a draft in front of the first slot that it doubts: DSpark by the chance to be accepted that
    it has learnt to say, DFlash and DFlash 2 where the likeliest token has a lower probability; 0: never. No value
    changes the output."""
    adapter: str | None = None
    """Adapter of a draft model by name, or `base` for none; empty: the one that its run trained."""
    vocabulary: Literal["same", "auto", "intersection", "retokenise"] = "same"
    """Draft models of another tokenizer: `same` refuses them, `intersection` drafts the tokens that
    both have, `retokenise` writes the drafted text anew, `auto` chooses by how many are shared."""
    tree: str = DEFAULT_TREE
    """Static tree of heads and EAGLE: `default`, `chain` (the likeliest token at each depth, as vLLM
    decodes Medusa), `optimised` (which `draftsmith tree` wrote beside the drafter), or a file like that."""
    medusa_nodes: int = Field(20, ge=2, le=4_096)
    """Nodes of the default static tree of Medusa and Hydra, the root included."""
    eagle_tree: Literal["chain", "static", "dynamic"] = "chain"
    """Shape of EAGLE's draft: a chain, EAGLE-1's static tree, EAGLE-2's by confidence."""
    eagle_top_k: int = Field(10, ge=1, le=1_000)
    """Nodes of the dynamic tree that are expanded at once."""
    eagle_nodes: int = Field(61, ge=2, le=4_096)
    """Nodes of the dynamic tree, the root included; at most those that it generates, which is
    1 + top_k + (depth - 1) * top_k^2."""
    block_tree: Literal["chain", "tree"] = "chain"
    """Shape of a block drafter's draft: a chain, or a tree of its likeliest tokens. DFlash's branches beside the
    likeliest chain, those of DSpark and DFlash 2 wherever paths are likely."""
    block_nodes: int = Field(16, ge=2, le=4_096)
    """Nodes of that tree, the root included."""
    block_children: int = Field(4, ge=1, le=64)
    """Children of a node of that tree at most, and nodes of a depth that have some."""
    members: int | None = Field(None, ge=1)
    """Draft with the first members of an ensemble alone; empty: with all."""
    adaptive_longest: int = Field(8, ge=1, le=1_000)
    """Most drafted tokens of `adaptive-draft`."""
    lookup_longest: int = Field(3, ge=1, le=1_000)
    """Tokens that `prompt-lookup` tries to match, at most."""
    lookup_tokens: int = Field(10, ge=1, le=1_000)
    """Tokens that `prompt-lookup` copies."""
    lookup_latest: bool = False
    """Of equal matches take the latest, not the first."""
    ngram_corpus: str = "stdlib"
    """Source of the texts that `ngram` counts, as in `data.source`."""
    ngram_order: int = Field(3, ge=2, le=64)
    """Tokens of the longest n-gram."""
    ngram_documents: int | None = Field(200, ge=1)
    """Documents counted; empty counts all."""
    ngram_tokens: int = Field(4, ge=1, le=1_000)
    """Tokens that `ngram` drafts."""
    llma_references: str | None = None
    """Source of the documents that `llma` copies from, as in `data.source`."""
    llma_documents: int | None = Field(50, ge=1)
    """Rows of that source that are used; empty uses all. A draft takes as long for many as for few."""
    llma_longest: int = Field(5, ge=1, le=1_000)
    """Tokens that `llma` tries to match, at most."""
    llma_tokens: int = Field(19, ge=1, le=1_000)
    """Tokens that `llma` copies."""
    rest_datastore: str | None = None
    """Folder that `draftsmith datastore build` wrote, for `rest`."""
    rest_nodes: int = Field(65, ge=2, le=4_096)
    """Nodes of `rest`'s tree, the root included."""
    rest_longest: int = Field(16, ge=2, le=1_000)
    """Tokens that `rest` tries to match, at most; at least two have to."""
    rest_tokens: int = Field(10, ge=1, le=1_000)
    """Longest continuation that `rest` drafts."""
    suffix_tokens: int = Field(16, ge=1, le=1_000)
    """Longest draft of `suffix`, or as long as `suffix_factor` and `suffix_depth` allow where that is less."""
    suffix_nodes: int | None = Field(None, ge=2, le=4_096)
    """Nodes of `suffix`'s tree, the root included; empty: it drafts a chain."""
    suffix_depth: int = Field(24, ge=2, le=256)
    """Tokens of the longest string that `suffix` counts: a match and what followed it, so that a match of m tokens
    drafts no more than the rest. Memory grows with it, and the time of a tree faster."""
    suffix_factor: float = Field(1.0, gt=0, le=100)
    """Tokens that `suffix` drafts at most, per token of the match."""
    suffix_least: float = Field(0.1, ge=0, le=1)
    """Probability, by what followed before, of the least likely string that `suffix` drafts."""
    suffix_datastore: str | None = None
    """Folder that `draftsmith datastore build` wrote, for `suffix` to look in too."""
    lookahead_window: int = Field(7, ge=1, le=256)
    """Columns W of the window of `lookahead`."""
    lookahead_ngram: int = Field(5, ge=2, le=256)
    """Tokens N of its n-grams."""
    lookahead_guesses: int = Field(7, ge=1, le=256)
    """Guesses G verified per call."""

    @model_validator(mode="after")
    def _what_is_drawn_has_a_temperature(self) -> Self:
        if self.temperature_factors and self.policy == "argmax":
            raise ValueError(
                "temperature_factors are of drawn tokens, and policy argmax draws none: leave one out; "
                "--drafter.temperature_factors '[]' does away with a recipe's own"
            )
        return self

    @model_validator(mode="after")
    def _a_tree_of_the_likeliest_draws_nothing(self) -> Self:
        for name, value in BRANCHING.items():
            if self.temperature_factors and getattr(self, name) == value:
                raise ValueError(
                    f"temperature_factors are of drawn tokens, and {name} {value} draws none: leave one out; "
                    "--drafter.temperature_factors '[]' does away with a recipe's own"
                )
        if self.confidence and self.block_tree == "tree":
            raise ValueError(
                "confidence ends chains, and block_tree is tree: leave one out; --drafter.confidence 0 does away with "
                "a recipe's own"
            )
        return self

    @model_validator(mode="after")
    def _factors_are_temperatures(self) -> Self:
        slivers = [each for each in self.temperature_factors if 0 < each < LEAST_FACTOR]
        if slivers:
            raise ValueError(
                f"temperature_factors has {slivers[0]:g}; expected 0, which takes the likeliest token, or at least "
                f"{LEAST_FACTOR:g}: logits over less run out of range"
            )
        return self


def check_values(section: str, **values: object) -> None:
    """Hold what Python code gives to the bounds of a recipe's values, those of `drafter` that begin with `section`.

    Raises:
        RequestError: a value that no recipe may have.
    """
    fields = {f"{section}_{'tokens' if name == 'draft_length' else name}": name for name in values}
    try:
        DrafterConfig.model_validate({field: values[name] for field, name in fields.items()}, strict=True)
    except ValidationError as error:
        (first, *_) = error.errors()
        field = str(first["loc"][0])
        raise RequestError(
            f"{fields[field]} is {first['input']!r:.80}: {first['msg'].lower()}, as drafter.{field} of a recipe"
        ) from None


def check_shortest(shortest: object, longest: int) -> None:
    """Raise RequestError where a match of `longest` tokens at most cannot have `shortest` at least."""
    if not isinstance(shortest, int) or not 1 <= shortest <= longest:
        raise RequestError(f"shortest is {shortest!r:.80}; expected a whole number from 1 to {longest}, the longest")


_NO_EAGLE_TREE = "which drafts no tree of EAGLE's"
# options of some families alone, and what a drafter of the others is or lacks
_LACKS = {
    "policy": "which always takes its likeliest tokens",
    "adapter": "which has no adapters",
    "members": "not an ensemble",
    "temperature_factors": "which draws nothing",
    "confidence": "which ends no draft by doubt",
    "block_tree": "no block drafter",
    "block_nodes": "no block drafter",
    "block_children": "no block drafter",
    "eagle_tree": _NO_EAGLE_TREE,
    "eagle_nodes": _NO_EAGLE_TREE,
    "eagle_top_k": _NO_EAGLE_TREE,
    "medusa_nodes": "which has no tree of heads",
}
# sizes of a tree, and the option whose value has them read
_SIZES = {
    "block_nodes": ("block_tree", BRANCHING["block_tree"]),
    "block_children": ("block_tree", BRANCHING["block_tree"]),
    "eagle_nodes": ("eagle_tree", BRANCHING["eagle_tree"]),
    "eagle_top_k": ("eagle_tree", BRANCHING["eagle_tree"]),
    "medusa_nodes": ("tree", DEFAULT_TREE),
}


def turned_off(given: Mapping[str, str]) -> list[str]:
    """The sizes of trees that options, as flags give them, turn off without setting them: a recipe's own say nothing
    any more."""
    return [size for size, (tree, shape) in _SIZES.items() if given.get(tree, shape) != shape and size not in given]


def check_options(family: Family, config: DrafterConfig, whose: str) -> None:
    """Raise RequestError for an option that a drafter of this family would ignore; `whose`: what is of that family."""
    defaults = DrafterConfig()
    for option, lack in _LACKS.items():
        value = getattr(config, option)
        if value != getattr(defaults, option) and option not in family.options:
            raise RequestError(
                f"drafter.{option} is {value!r}, and {whose} is a drafter of family {family.name!r}, {lack}; leave "
                "it out"
            )
    for size, (tree, shape) in _SIZES.items():
        value, asked = getattr(config, size), getattr(config, tree)
        if value != getattr(defaults, size) and asked != shape:
            raise RequestError(
                f"drafter.{size} is {value!r}, read only with drafter.{tree} {shape}, and that is {asked!r}; "
                f"add --drafter.{tree} {shape}, or leave it out"
            )
    unused = family.tree_unused(config) if config.tree != DEFAULT_TREE else None
    if unused is not None:
        reason, remedy = unused
        raise RequestError(
            f"drafter.tree is {config.tree!r}, a static tree, which this drafter of family {family.name!r} "
            f"does not use ({reason}); {remedy}"
        )
