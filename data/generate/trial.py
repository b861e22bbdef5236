"""Whether training would learn from answers: each goes through the training's own encoder as soon as it is there.

Where it would learn from none of the first ones, or of none of the first rows whatever is answered, thousands
more need not be asked for. Read next: `answers.py`, which asks here; `rows/encode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...errors import DataError
from ..config import RowShape
from ..rows.chats.turns import NOTES
from ..rows.encode import Encoder
from ..rows.raw import BadRow
from ..rows.shapes import parse

FIRST = 8
"""Rows of which one has to be learnt from."""


@dataclass
class Trial:
    """The verdicts so far."""

    learnt: bool = False
    refused: list[str] = field(default_factory=list)

    def check(self, row: dict[str, Any], shape: RowShape, encoder: Encoder) -> None:
        """Read and encode an answered row as training will.

        Raises:
            BadRow: training would leave it out. DataError: it would have left out all of the first rows.
        """
        try:
            (encoded,) = encoder([parse(row, shape)])
        except BadRow as bad:
            encoded = bad
        if not isinstance(encoded, BadRow) and any(each.in_loss[1:].any() for each in encoded.documents):
            self.learnt = True
            return
        if isinstance(encoded, BadRow):
            reason = str(encoded)
        else:
            reason = "no token of it counts in the loss"
            notes = "; ".join(f"{count} {NOTES[why]}" for why, count in encoded.notes.items())
            reason += f" (answers: {notes})" if notes else ""
        if not self.learnt:
            self.refused.append(reason)
            if len(self.refused) >= FIRST:
                raise DataError(self.failure())
        raise BadRow(reason)

    def failure(self) -> str:
        """Why nothing more is asked for."""
        return (
            f"training would leave out every one of the first {len(self.refused)} answered rows, so no more are asked "
            f"for; the last one: {self.refused[-1]}. Look with `draftsmith inspect` at rows of your own, and see "
            "docs/data.md on templates"
        )
