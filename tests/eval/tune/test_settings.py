"""Settings in words: those that the field uses, no two alike, and no name of a recipe value left."""

from __future__ import annotations

import json

import pytest
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.grids import LLMA, NGRAM, PROMPT_LOOKUP
from draftsmith.drafters.temperatures import FACTORS
from draftsmith.eval.tune.settings import in_words

CHAIN = {"drafter.eagle.tree": "chain", "drafter.tree": "default"}
BLOCK = {"drafter.block.tree": "chain", "drafter.policy": "sample", "eval.draft_length": "4"}
BLOCK_TREE = {"drafter.block.tree": "tree", "drafter.block.children": "4", "eval.draft_length": "8"}
DYNAMIC = {"drafter.eagle.tree": "dynamic", "drafter.tree": "default", FACTORS: "[]"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**CHAIN, "eval.draft_length": "1"}, "chain of 1"),
        ({**CHAIN, "drafter.policy": "sample", FACTORS: "[]", "eval.draft_length": "3"}, "chain of 3"),
        ({"drafter.policy": "argmax", "eval.draft_length": "3"}, "chain of 3, likeliest tokens"),
        ({"eval.draft_length": "2", FACTORS: json.dumps([0.9, 1.1])}, "chain of 2, drawn at 0.9 and 1.1 times"),
        ({"eval.draft_length": "1", FACTORS: "[0.9]"}, "chain of 1, drawn at 0.9 times the temperature"),
        ({**DYNAMIC, "eval.draft_length": "5", "drafter.eagle.nodes": "16"}, "tree of 16 nodes, 5 deep"),
        ({"drafter.tree": "default", "drafter.medusa.nodes": "8"}, "tree of 8 nodes"),
        ({"drafter.tree": "chain", "eval.draft_length": "2"}, "chain of 2"),
        ({**BLOCK, "drafter.confidence": "0.0"}, "chain of 4"),
        ({**BLOCK, "drafter.confidence": "0.4"}, "chain of 4, cut below confidence 0.4"),
        ({**BLOCK_TREE, "drafter.block.nodes": "6"}, "tree of 6 nodes, 8 deep, 4 children a node"),
        ({"drafter.lookup.tokens": "1"}, "copies at most 1 token"),
        ({"drafter.lookup.tokens": "6"}, "copies at most 6 tokens"),
        ({"drafter.rest.nodes": "6"}, "rest nodes 6"),  # nobody has found words for it
        ({}, ""),
    ],
)
def test_words(values: dict[str, str], words: str) -> None:
    assert in_words(values).startswith(words)


def test_every_setting_has_words_of_its_own() -> None:
    """A method's rows in one table are told apart by them."""
    every = [*(family.grids for family in FAMILIES.values()), PROMPT_LOOKUP, NGRAM, LLMA]
    for grids in every:
        said = [in_words(grid.values(size)) for grid in grids for size in grid.sizes]
        assert len(set(said)) == len(said), said
        assert not any("_" in words or "drafter" in words or "eval" in words for words in said), said
    assert sum(map(bool, every)) > 10
