"""Families that the rest of the package knows by their records alone, as it would know a user's own.

Methods of the literature that seldom pay beside prompt lookup and suffix decoding (docs/methods.md), kept to be
compared with. Read next: `family.py`, which makes them.
"""

from __future__ import annotations

from ..grids import LLMA, NGRAM, Grid
from ..record import Family, own_toy


def _without_training(name: str, summary: str, grids: tuple[Grid, ...] = ()) -> Family:
    """A family that drafts without training, by the section of `drafter` of its name."""
    return Family(
        name=name,
        title=name,
        kind="no training",
        summary=summary,
        page="methods.md",
        make=f".extras.family:{name}",
        options=frozenset({name}),
        grids=grids,
        toy=own_toy(name),
    )


EXTRAS = (
    Family(
        name="adaptive-draft",
        title="adaptive draft",
        kind="model",
        summary="a draft model whose draft length follows the acceptance of each row",
        page="methods.md",
        wrap=".extras.family:adaptive",
        options=frozenset({"adaptive"}),
        toy=own_toy("adaptive-draft"),
    ),
    _without_training("ngram", "the likeliest next token after the last few, counted from a corpus", NGRAM),
    _without_training("llma", "copies from reference documents where the last tokens stand in one", LLMA),
    _without_training("rest", "retrieves continuations from a datastore and verifies them as a trie"),
    _without_training("lookahead", "n-grams out of the target's own Jacobi iterations, guessed and verified"),
)
