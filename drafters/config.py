"""The recipe section that drafters read, and what of it each family has a use for. No torch here.

Read next: `families.py`, whose records name what they read.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from ..config import Section, inner_sections
from ..errors import RequestError
from ..storage.identity import flat
from .temperatures import Policy

if TYPE_CHECKING:
    from .record import Family

DEFAULT_TREE = "default"
OPTIMISED_TREE = "optimised"
CHAIN_TREE = "chain"
BY_AUTO = "config=DrafterConfig(vocabulary='auto') in Python, on the command line by --drafter.vocabulary auto"
"""How a draft model of another tokenizer is allowed."""
BRANCHING = {"eagle.tree": "dynamic", "block.tree": "tree"}
"""Shapes of a draft that are trees of the likeliest tokens, by the option that chooses them."""
LEAST_FACTOR = 0.05
"""Of a draft temperature that is not 0."""


class MedusaOptions(Section):
    """How Medusa and Hydra draft."""

    nodes: int = Field(20, ge=2, le=4_096)
    """Nodes of the default static tree of Medusa and Hydra, the root included."""


class EagleOptions(Section):
    """How EAGLE and MTP modules draft."""

    tree: Literal["chain", "static", "dynamic"] = "chain"
    """Shape of EAGLE's draft: a chain, EAGLE-1's static tree, EAGLE-2's by confidence."""
    top_k: int = Field(10, ge=1, le=1_000)
    """Nodes of the dynamic tree that are expanded at once."""
    nodes: int = Field(61, ge=2, le=4_096)
    """Nodes of the dynamic tree, the root included; at most those that it generates, which is
    1 + top_k + (depth - 1) * top_k^2."""


class BlockOptions(Section):
    """How DFlash, DSpark and DFlash 2 draft."""

    tree: Literal["chain", "tree"] = "chain"
    """Shape of a block drafter's draft: a chain, or a tree of its likeliest tokens. DFlash's branches beside the
    likeliest chain, those of DSpark and DFlash 2 wherever paths are likely."""
    nodes: int = Field(16, ge=2, le=4_096)
    """Nodes of that tree, the root included."""
    children: int = Field(4, ge=1, le=64)
    """Children of a node of that tree at most, and nodes of a depth that have some."""


class AdaptiveOptions(Section):
    """How `adaptive-draft` drafts."""

    longest: int = Field(8, ge=1, le=1_000)
    """Most drafted tokens of `adaptive-draft`."""


class LookupOptions(Section):
    """How `prompt-lookup` drafts."""

    longest: int = Field(3, ge=1, le=1_000)
    """Tokens that `prompt-lookup` tries to match, at most."""
    tokens: int = Field(10, ge=1, le=1_000)
    """Tokens that `prompt-lookup` copies."""
    latest: bool = False
    """Of equal matches take the latest, not the first."""


class NgramOptions(Section):
    """How `ngram` drafts."""

    corpus: str = "stdlib"
    """Source of the texts that `ngram` counts, as in `data.source`."""
    order: int = Field(3, ge=2, le=64)
    """Tokens of the longest n-gram."""
    documents: int | None = Field(200, ge=1)
    """Documents counted; empty counts all."""
    tokens: int = Field(4, ge=1, le=1_000)
    """Tokens that `ngram` drafts."""


class LlmaOptions(Section):
    """How `llma` drafts."""

    references: str | None = None
    """Source of the documents that `llma` copies from, as in `data.source`."""
    documents: int | None = Field(50, ge=1)
    """Rows of that source that are used; empty uses all. A draft takes as long for many as for few."""
    longest: int = Field(5, ge=1, le=1_000)
    """Tokens that `llma` tries to match, at most."""
    tokens: int = Field(19, ge=1, le=1_000)
    """Tokens that `llma` copies."""


class RestOptions(Section):
    """How `rest` drafts."""

    datastore: str | None = None
    """Folder that `draftsmith datastore build` wrote, for `rest`."""
    nodes: int = Field(65, ge=2, le=4_096)
    """Nodes of `rest`'s tree, the root included."""
    longest: int = Field(16, ge=2, le=1_000)
    """Tokens that `rest` tries to match, at most; at least two have to."""
    tokens: int = Field(10, ge=1, le=1_000)
    """Longest continuation that `rest` drafts."""


class SuffixOptions(Section):
    """How `suffix` drafts, also in `suffix-hybrid`."""

    tokens: int = Field(16, ge=1, le=1_000)
    """Longest draft of `suffix`, or as long as `factor` and `depth` allow where that is less."""
    nodes: int | None = Field(None, ge=2, le=4_096)
    """Nodes of `suffix`'s tree, the root included; empty: it drafts a chain."""
    depth: int = Field(24, ge=2, le=256)
    """Tokens of the longest string that `suffix` counts: a match and what followed it, so that a match of m tokens
    drafts no more than the rest. Memory grows with it, and the time of a tree faster."""
    factor: float = Field(1.0, gt=0, le=100)
    """Tokens that `suffix` drafts at most, per token of the match."""
    least: float = Field(0.1, ge=0, le=1)
    """Probability, by what followed before, of the least likely string that `suffix` drafts."""
    datastore: str | None = None
    """Folder that `draftsmith datastore build` wrote, for `suffix` to look in too."""


class LookaheadOptions(Section):
    """How `lookahead` drafts."""

    window: int = Field(7, ge=1, le=256)
    """Columns W of the window of `lookahead`."""
    ngram: int = Field(5, ge=2, le=256)
    """Tokens N of its n-grams."""
    guesses: int = Field(7, ge=1, le=256)
    """Guesses G verified per call."""


class DrafterConfig(Section):
    """How drafters propose: what several families read, and a section for each that has options of its own."""

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
    draft_vocabulary: Annotated[int, Field(ge=2)] | str | list[Annotated[int, Field(ge=0)]] | None = None
    """Draft these tokens alone: a number takes so many of the most frequent tokens of the recipe's training rows; a
    file names ids (a JSON list, a text with one in a line, `d2t` of a drafter's safetensors), a folder is a drafter's;
    empty: all that the drafter can. The rows of its projection are cut, so that a draft step costs less where the
    vocabulary is large. No value changes the output; `draftsmith tune` chooses a size."""
    tree: str = DEFAULT_TREE
    """Static tree of heads and EAGLE: `default`, `chain` (the likeliest token at each depth, as vLLM
    decodes Medusa), `optimised` (which `draftsmith tree` wrote beside the drafter), or a file like that."""
    members: int | None = Field(None, ge=1)
    """Draft with the first members of an ensemble alone; empty: with all."""
    medusa: MedusaOptions = Field(default_factory=MedusaOptions)
    eagle: EagleOptions = Field(default_factory=EagleOptions)
    block: BlockOptions = Field(default_factory=BlockOptions)
    adaptive: AdaptiveOptions = Field(default_factory=AdaptiveOptions)
    lookup: LookupOptions = Field(default_factory=LookupOptions)
    ngram: NgramOptions = Field(default_factory=NgramOptions)
    llma: LlmaOptions = Field(default_factory=LlmaOptions)
    rest: RestOptions = Field(default_factory=RestOptions)
    suffix: SuffixOptions = Field(default_factory=SuffixOptions)
    lookahead: LookaheadOptions = Field(default_factory=LookaheadOptions)

    @model_validator(mode="before")
    @classmethod
    def _old_names(cls, given: Any) -> Any:
        old = [name for name in given if name in old_names()] if isinstance(given, dict) else []
        if not old:
            return given
        warnings.warn(f"{old[0]} of DrafterConfig is {old_names()[old[0]]} now", DeprecationWarning, stacklevel=3)
        made = {name: value for name, value in given.items() if name not in old}
        for name in old:
            section, field = old_names()[name].split(".")
            made[section] = {**made.get(section, {}), field: given[name]}
        return made

    @field_validator("draft_vocabulary", mode="before")
    @classmethod
    def _a_number_is_a_size(cls, given: Any) -> Any:
        """Flags and tuned settings give numbers as text."""
        given = int(given) if isinstance(given, str) and given.isdecimal() else given
        if isinstance(given, int) and given < 2:
            raise ValueError("expected 2 tokens or more")
        return given

    @property
    def draft_ids(self) -> list[int] | None:
        """The ids of `draft_vocabulary`, ascending; None: all.

        Raises:
            RequestError: it is a size or a file, which `load_drafter` or the command has not looked up.
        """
        if self.draft_vocabulary is None or isinstance(self.draft_vocabulary, list):
            return self.draft_vocabulary
        raise RequestError(
            f"drafter.draft_vocabulary is {self.draft_vocabulary!r:.80}, and no rows are here whose tokens could be "
            "counted: give the ids, or a file of them; commands count the training rows of their recipe"
        )

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
            if self.temperature_factors and attrgetter(name)(self) == value:
                raise ValueError(
                    f"temperature_factors are of drawn tokens, and {name} {value} draws none: leave one out; "
                    "--drafter.temperature_factors '[]' does away with a recipe's own"
                )
        if self.confidence and self.block.tree == "tree":
            raise ValueError(
                "confidence ends chains, and block.tree is tree: leave one out; --drafter.confidence 0 does away with "
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


@cache
def old_names() -> dict[str, str]:
    """What the fields were called before they stood in sections -> their path in `drafter` now."""
    inner = inner_sections(DrafterConfig).items()
    return {f"{name}_{field}": f"{name}.{field}" for name, kind in inner for field in kind.model_fields}


def current_path(path: str) -> str:
    """A dotted path of a recipe as it is called now."""
    section, _, name = path.partition(".")
    return f"drafter.{old_names()[name]}" if section == "drafter" and name in old_names() else path


def check_values(section: str, **values: object) -> None:
    """Hold what Python code gives to the bounds of a recipe's values, those of a section of `drafter`.

    Raises:
        RequestError: a value that no recipe may have.
    """
    kind = inner_sections(DrafterConfig)[section]
    fields = {"tokens" if name == "draft_length" else name: name for name in values}
    try:
        kind.model_validate({field: values[name] for field, name in fields.items()}, strict=True)
    except ValidationError as error:
        (first, *_) = error.errors()
        field = str(first["loc"][0])
        found = f"{fields[field]} is {first['input']!r:.80}: {first['msg'].lower()}"
        raise RequestError(f"{found}, as drafter.{section}.{field} of a recipe") from None


def check_shortest(shortest: object, longest: int) -> None:
    """Raise RequestError where a match of `longest` tokens at most cannot have `shortest` at least."""
    if not isinstance(shortest, int) or not 1 <= shortest <= longest:
        raise RequestError(f"shortest is {shortest!r:.80}; expected a whole number from 1 to {longest}, the longest")


# options of some families alone, and what a drafter of the others is or lacks
_LACKS = {
    "policy": "which always takes its likeliest tokens",
    "draft_vocabulary": "which has no projection that could be cut",
    "adapter": "which has no adapters",
    "members": "not an ensemble",
    "temperature_factors": "which draws nothing",
    "confidence": "which ends no draft by doubt",
    "block": "no block drafter",
    "eagle": "which drafts no tree of EAGLE's",
} | {"medusa": "which has no tree of heads"}
# sizes of a tree, and the option whose value has them read
_SIZES = {
    "block.nodes": ("block.tree", BRANCHING["block.tree"]),
    "block.children": ("block.tree", BRANCHING["block.tree"]),
    "eagle.nodes": ("eagle.tree", BRANCHING["eagle.tree"]),
    "eagle.top_k": ("eagle.tree", BRANCHING["eagle.tree"]),
    "medusa.nodes": ("tree", DEFAULT_TREE),
}


def turned_off(given: Mapping[str, str]) -> list[str]:
    """The sizes of trees that options, as flags give them, turn off without setting them: a recipe's own say nothing
    any more."""
    return [size for size, (tree, shape) in _SIZES.items() if given.get(tree, shape) != shape and size not in given]


def check_options(family: Family, config: DrafterConfig, whose: str) -> None:
    """Raise RequestError for an option that a drafter of this family would ignore; `whose`: what is of that family."""
    values, defaults = flat(config.model_dump()), flat(DrafterConfig().model_dump())
    for option, value in values.items():
        lack = _LACKS.get(option.partition(".")[0])
        if lack is not None and value != defaults[option] and not family.reads(option):
            raise RequestError(
                f"drafter.{option} is {value!r}, and {whose} is a drafter of family {family.name!r}, {lack}; leave "
                "it out"
            )
    for size, (tree, shape) in _SIZES.items():
        value, asked = values[size], values[tree]
        if value != defaults[size] and asked != shape:
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
