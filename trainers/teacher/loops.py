"""Rows that a model writes itself, of which only what goes round in a loop counts.

Sequence-level unlikelihood (Welleck et al. 2020, arXiv 1908.04319, section 5.2): a greedy continuation of a prompt
from the text is what decoding will write; where it repeats itself, its tokens become labels to avoid. Read next:
`../target.py`, the loss; `rollouts.py`, the writing.

Shapes: R rows of this process, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...data.loops import in_loop
from ...errors import RequestError
from ..loop.objective import Batch
from ..method_config import RolloutsConfig
from .rollouts import REPLACED, Rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_loops(config: RolloutsConfig) -> None:
    """Raise RequestError where a model would learn its own text, or avoid what it never writes."""
    if config.share and not config.unlikelihood:
        raise RequestError(
            f"rollouts.share is {config.share:g} and rollouts.unlikelihood is 0: a target has nothing to learn from "
            "its own text but which loops to leave; set rollouts.unlikelihood, or rollouts.share to 0"
        )
    if config.unlikelihood and not config.share:
        raise RequestError(
            f"rollouts.unlikelihood is {config.unlikelihood:g} and rollouts.share is 0: loops are looked for in rows "
            "that the model writes; set rollouts.share, or rollouts.unlikelihood to 0"
        )


class LoopedRows(Rollouts):
    """Rollouts of the model that is trained: every label of a row that it wrote is one to avoid."""

    def __init__(self, config: RolloutsConfig, model: PreTrainedModel) -> None:
        super().__init__(config, model, model)

    def written(self, rows: Batch, indices: Sequence[int], seed: int, device: torch.device) -> Batch:
        """The rows that are replaced, on the CPU."""
        return only_loops(super().written(rows, indices, seed, device))


def only_loops(rows: Batch) -> Batch:
    """The rows, `loss_mask` of those that were `replaced` cut to what stands in a loop."""
    counts_RS = rows["loss_mask"].clone()
    for at in rows[REPLACED].nonzero()[:, 0].tolist():
        counts_RS[at] = looped(rows["input_ids"][at], rows["documents"][at], rows["loss_mask"][at])
    return {**rows, "loss_mask": counts_RS}


def looped(id_S: Tensor, document_S: Tensor, written_S: Tensor) -> Tensor:
    """Which written tokens of a row stand in a loop of their own continuation, bool [S]."""
    avoid_S = torch.zeros_like(written_S)
    for document in document_S[written_S].unique().tolist():
        places = (written_S & (document_S == document)).nonzero()[:, 0]
        avoid_S[places] = torch.tensor(in_loop(id_S[places].tolist()))
    return avoid_S
