"""A drafter's setting in words: `chain of 3`, `tree of 16 nodes, 5 deep`. No torch here.

Read next: `drafters/grids.py`, the settings that `draftsmith tune` chooses from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from ...drafters.grids import NO_FACTORS
from ...drafters.temperatures import FACTORS

_LENGTH = "eval.draft_length"
_COPIED = ("drafter.lookup_tokens", "drafter.llma_tokens", "drafter.suffix_tokens")
_NODES = ("drafter.medusa_nodes", "drafter.eagle_nodes", "drafter.block_nodes")
# what the words for a size say already: whether it is a chain's or a tree's
_SHAPES = {
    "drafter.tree": ("default", "chain"),
    "drafter.eagle_tree": ("chain", "dynamic"),
    "drafter.block_tree": ("chain", "tree"),
}


def in_words(values: Mapping[str, str]) -> str:
    """Recipe values of a drafter, as flags give them; empty where there are none."""
    return ", ".join(words for _, words in phrases(values))


def phrases(values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The values that have to be named, each with the words for it; those of the size first."""
    is_tree = any(name in _NODES for name in values)
    ordered = sorted(values.items(), key=lambda item: (item[0] not in _NODES, item[0] != _LENGTH))
    for name, value in ordered:
        if words := _phrase(name, value, is_tree=is_tree):
            yield name, words


def _phrase(name: str, value: str, *, is_tree: bool) -> str:
    """Nothing for what goes without saying."""
    if name in _NODES:
        return f"tree of {value} nodes"
    if name == _LENGTH:
        return f"{value} deep" if is_tree else f"chain of {value}"
    if name in _COPIED:
        return f"copies at most {_tokens(value)}"
    if name == "drafter.ngram_tokens":
        return f"chain of {value}"
    if name == "drafter.policy":
        return "likeliest tokens" if value == "argmax" else ""
    if name == "drafter.block_children":
        return f"{value} children a node"
    if name == "drafter.confidence":
        return f"cut below confidence {value}" if float(value) else ""
    if name == FACTORS:
        return "" if value == NO_FACTORS else f"drawn at {_factors(value)} times the temperature"
    return "" if value in _SHAPES.get(name, ()) else f"{name.split('.', 1)[-1].replace('_', ' ')} {value}"


def _tokens(value: str) -> str:
    return "1 token" if value == "1" else f"{value} tokens"


def _factors(value: str) -> str:
    """Those of depths 1, 2, ...: `0.9 and 1.1`."""
    *first, last = [f"{each:g}" for each in json.loads(value)]
    return f"{', '.join(first)} and {last}" if first else last
