"""What the loop asks of a method, and the parts that methods share.

An objective is an `nn.Module` around what is trained: its forward pass is the loss, so that
whatever wraps the module (DDP, FSDP, DeepSpeed) sees one ordinary forward and backward.
Read next: `target.py` and `distill.py`, the objectives; `loop.py`, which drives them.

Shapes: R rows, S tokens of a row, P labelled positions, H hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .rollouts import Rollouts

Batch = dict[str, Tensor]


class Objective(Protocol):
    """A method's side of training; everything else is the loop's."""

    module: nn.Module
    """Its forward takes (batch, lesson) and returns the loss summed over labels, and all terms."""

    def prepare(self, batch: Batch) -> Any:
        """What the frozen target says about the batch (the lesson); None where there is none."""

    def export(self, folder: Path) -> None:
        """Write the trained model for use outside training."""

    def draft(self) -> nn.Module | None:
        """The module that decodes, for probes; None when the method trains no drafter."""


@runtime_checkable
class Stepwise(Protocol):
    """An objective whose loss is not the same function at every step."""

    def begin_step(self, step: int, seed: int) -> None:
        """Called before the step's first batch; `seed` is the step's own, on every process."""


@runtime_checkable
class Scheduled(Protocol):
    """An objective whose loss depends on how far the run has come."""

    def set_steps(self, steps: int) -> None:
        """Called once, with the number of steps of the whole run."""


@runtime_checkable
class OnPolicy(Protocol):
    """An objective some of whose rows are written by the models themselves, if any are."""

    rollouts: Rollouts | None


class Labelled(NamedTuple):
    """The hidden states that predict a label, and the labels."""

    hidden_PH: Tensor
    label_P: Tensor


def hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Last hidden states [R, S, H], attention kept inside each document."""
    decoder = model.get_decoder()
    return decoder(
        input_ids=batch["input_ids"],
        attention_mask=document_mask(batch["documents"]),
        position_ids=batch["positions"],
        use_cache=False,
    ).last_hidden_state


def document_mask(documents_RS: Tensor) -> Tensor:
    """[R, 1, S, S], True where a token may look: itself and earlier tokens of its document."""
    S = documents_RS.shape[1]
    same_RSS = documents_RS[:, :, None] == documents_RS[:, None, :]
    causal_SS = torch.ones(S, S, dtype=torch.bool, device=documents_RS.device).tril()
    # padding shares the number -1, so it looks at padding only and no row of the mask is empty
    return (same_RSS & causal_SS)[:, None]


def labelled(hidden_RSH: Tensor, batch: Batch) -> Labelled:
    """Pair position t with the token at t + 1 where that token counts in the loss."""
    counts_RS = batch["loss_mask"][:, 1:]
    return Labelled(hidden_RSH[:, :-1][counts_RS], batch["input_ids"][:, 1:][counts_RS])


def label_shares(batch: Batch) -> Tensor | None:
    """How much each labelled position counts, fp32 [P], by the batch's `share`; None: all alike."""
    share_RS = batch.get("share")
    return None if share_RS is None else share_RS[:, 1:][batch["loss_mask"][:, 1:]]
