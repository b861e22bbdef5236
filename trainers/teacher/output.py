"""What the frozen target computes for a batch, as students that read hidden states get it.

Read next: `features.py`, where hidden states come from.

Shapes: R rows, S tokens of a row (of rows that are cut over processes, those that are held), H hidden size, F numbers
of the fused states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ...drafters.layers.row_split import WHOLE, RowSplit
from ..loop.objective import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OwnPositions(NamedTuple):
    """The positions of every row whose states are handed out: those of this process, and a halo behind them."""

    split: RowSplit = WHOLE
    ahead: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether these are all positions."""
        return self.split.parts == 1

    def held(self, length: int) -> slice:
        """Which positions, of rows of so many tokens."""
        return self.split.held(length, self.ahead)


ALL = OwnPositions()


class TeacherOutput(NamedTuple):
    """The target's numbers for one batch, in its own precision; none needs a gradient."""

    hidden_RSH: Tensor
    """The last hidden states, which its output projection reads."""
    embeds_RSH: Tensor | None = None
    """Its embedding of the token behind each position, x_{t+1}, for students that read tokens;
    garbage at the end of a row. See `next_embeds`."""
    fused_RSF: Tensor | None = None
    """Hidden states of several layers side by side, for EAGLE-3."""


def next_embeds(target: PreTrainedModel, batch: Batch, part: OwnPositions = ALL) -> Tensor:
    """`TeacherOutput.embeds_RSH` of a batch, at the positions of `part`."""
    embed: Any = target.get_input_embeddings()
    ids_RS = batch["input_ids"].roll(-1, 1)
    return embed(ids_RS[:, part.held(ids_RS.shape[1])])
