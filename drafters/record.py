"""What is known of a drafter family without its code: its record.

A record names the functions of a family as "module:function", relative to this package or absolute, or is given the
functions themselves, and imports nothing until one is asked for. Read next: `families.py`, the records there are;
`extras/records.py`, those of a family that the others know nothing of, as a user's own would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal, Protocol

from .config import DrafterConfig
from .grids import Grid

_CHAINS = ("it drafts chains", "leave it out")
POLICY = "policy"
Reference = str | Callable[..., Any]
"""A function as "module:name", or itself, for records that are made where it is."""
Kind = Literal["model", "on target", "from target", "several models", "no training"]


@dataclass(frozen=True)
class Form:
    """A family in one serving format."""

    method: str
    """What the engine calls the family."""
    make: Reference | None = None
    """(net, target, how: Served) -> Export; None: the engine loads the drafter's own folder."""
    parallel: bool = False
    """Whether the engine has to be told that all drafts come out of one pass, in its own words."""
    same_rows: bool = False
    """Whether the engine loads a draft model only if its vocabulary has as many rows as the target's."""


class Corpora(Protocol):
    """Where drafters without training find text; the data room supplies it."""

    def texts(self, source: str, limit: int | None) -> Iterator[list[int]]:
        """The texts of a source as token ids."""
        ...

    def datastore(self, folder: str) -> Any:
        """An opened datastore of the target's tokenizer."""
        ...


@dataclass(frozen=True)
class Family:
    """One kind of drafter."""

    name: str
    """As drafter folders and proposers name it."""
    title: str
    """As tables show it."""
    kind: Kind
    """`model`: a causal LM by itself; `on target`: reads the target's hidden states; `from target`:
    made from the target's own weights when it is loaded; `several models`: that draft together."""
    summary: str
    """One line for the docs."""
    page: str
    """The page of docs/ that describes it."""
    toy: Callable[[Any], str]
    """The name of the toy as which the audit enumerates a proposer of this family (`eval/audit/toys.py`)."""
    build: Reference | None = None
    """(settings) -> nn.Module, on whatever device is the default, `meta` included; `settings` as a
    drafter folder's `config.json` holds them. None: a model of `transformers`, or no module."""
    load: Reference | None = None
    """(folder, target, *, draft_length, config) -> Proposer; None: there is no folder of it."""
    proposer: Reference | None = None
    """(module, target, draft_length) -> Proposer, for a module in training, trees by default."""
    make: Reference | None = None
    """(config, target, corpora) -> Proposer, without training."""
    wrap: Reference | None = None
    """(config, drafter, corpora) -> Proposer, around a loaded drafter."""
    hidden_states: Callable[[Mapping[str, Any]], int] = lambda _settings: 1
    """How many hidden states of a token it is taught by, from its settings."""
    toys: Mapping[str, Reference] = field(default_factory=dict)
    """Toys that the audit does not make itself: name -> (target, drafts) -> Proposer, all of them tables."""
    exports: Mapping[str, Form] = field(default_factory=dict)
    """Serving formats, by the name that `--format` has for them."""
    unchecked: Mapping[str, str] = field(default_factory=dict)
    """Formats that somebody loads the family in, and that were not checked here -> who, for the refusal."""
    elsewhere: str = ""
    """Why it cannot be loaded in all others, for the refusal."""
    most_tokens: Callable[[Mapping[str, Any]], int | None] = lambda _settings: None
    """Most tokens of a chain that it drafts, from its settings; None: any."""
    longest: Callable[[DrafterConfig], int | None] = lambda _config: None
    """Most tokens that it drafts by what a recipe says, if it is not trained; None: any."""
    whole_blocks: Callable[[Mapping[str, Any]], bool] = lambda _settings: False
    """Whether the first drafts of a chain depend on how many follow, so that engines have to draft the most."""
    any_states: bool = False
    """Whether it drafts from the text alone, for every target of its tokenizer."""
    copies_target: bool = False
    """Whether loading it makes another copy of the target's layers, in fewer bits."""
    grids: tuple[Grid, ...] = ()
    """Settings that `draftsmith tune` tries; none: it drafts in one way."""
    options: frozenset[str] = frozenset()
    """Of the fields and sections of `drafter`, those that it reads, `tree` and `vocabulary` apart."""
    tree_unused: Callable[[DrafterConfig], tuple[str, str] | None] = lambda _config: _CHAINS
    """Why a static tree that `drafter.tree` names would not be used, and what to do; None: it is."""

    def reads(self, option: str) -> bool:
        """Whether it reads the value at a dotted path of `drafter`."""
        return option.partition(".")[0] in self.options

    @property
    def samples(self) -> bool:
        """Whether `drafter.policy` says how its drafts are drawn above temperature 0."""
        return POLICY in self.options


def function(reference: Reference) -> Callable[..., Any]:
    """The function that a record names, imported now."""
    if not isinstance(reference, str):
        return reference
    module, name = reference.split(":")
    return attrgetter(name)(import_module(module, __package__))


def own_toy(name: str) -> Callable[[Any], str]:
    """Where every drafter of a family has one toy."""
    return lambda _drafter: name
