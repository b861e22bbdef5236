"""Whether the id that stands for what is not known is one that texts have.

Read next: `../methods.py`, whose records say which field names it; `frozen.py`, which asks once rows are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

import numpy as np

from ...data.rows.cache import Prepared
from ...data.rows.packed import Ids
from ...errors import RequestError
from ..methods import METHODS
from ..recipe import TrainingRecipe

_LOOKED_AT = 1000
"""Rows: an id that is in none of the first thousand is a rare one, and costs little."""


def check_unused(recipe: TrainingRecipe, texts: Iterable[Ids]) -> None:
    """Raise RequestError where a mask that the recipe names stands in texts, as what ends them does."""
    field = METHODS[recipe.method].mask_field
    token = attrgetter(field)(recipe) if field else None
    if token is None:
        return
    seen, found = 0, 0
    for ids in texts:
        seen, found = seen + 1, found + bool((np.asarray(ids) == token).any())
    if found:
        raise RequestError(
            f"{field} is {token}, and {found} of the first {seen} rows have that token; it stands for what is not "
            "known, so no text may have it: name another id, or leave it out"
        )


def texts_of(rows: Prepared) -> Iterator[Ids]:
    """The first rows to train on, each without its padding."""
    few = zip(rows.train.ids_RS[:_LOOKED_AT], rows.train.document_RS[:_LOOKED_AT], strict=True)
    return (ids_S[document_S >= 0] for ids_S, document_S in few)
