"""Whether the id that stands for what is not known is one that texts have.

Read next: `common.py` and `pard.py`, whose masks it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ...data.rows.cache import Prepared
from ...data.rows.packed import Ids
from ...errors import RequestError

_LOOKED_AT = 1000
"""Rows: an id that is in none of the first thousand is a rare one, and costs little."""


def check_unused(field: str, token: int | None, texts: Iterable[Ids]) -> None:
    """Raise RequestError where a mask that is named stands in texts, as what ends them does.

    Args:
        field: where it is named; `token`: None where it is not.
    """
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
