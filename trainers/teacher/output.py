"""What the frozen target computes for a batch, as students that read hidden states get it.

Read next: `features.py`, where hidden states come from.

Shapes: R rows, S tokens of a row, H hidden size, F numbers of the fused states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..loop.objective import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TeacherOutput(NamedTuple):
    """The target's numbers for one batch, in its own precision; none needs a gradient."""

    hidden_RSH: Tensor
    """The last hidden states, which its output projection reads."""
    embeds_RSH: Tensor | None = None
    """Its embedding of the token behind each position, x_{t+1}, for students that read tokens;
    garbage at the end of a row. See `next_embeds`."""
    fused_RSF: Tensor | None = None
    """Hidden states of several layers side by side, for EAGLE-3."""


def next_embeds(target: PreTrainedModel, batch: Batch) -> Tensor:
    """`TeacherOutput.embeds_RSH` of a batch."""
    embed: Any = target.get_input_embeddings()
    return embed(batch["input_ids"].roll(-1, 1))
