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

from ...decoding.target.backbone import context_limits
from ...decoding.target.hub import load_config
from ...drafters.folder import check_trainable_model
from ...errors import RequestError
from ..config import FROM_TARGET, ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..teacher.rollouts import Rollouts

Batch = dict[str, Tensor]


class Objective(Protocol):
    """A method's side of training; everything else is the loop's."""

    module: nn.Module
    """Its forward takes (batch, teacher output) and returns the loss summed over labels, and all terms."""

    def prepare(self, batch: Batch) -> Any:
        """What the frozen target says about the batch (the teacher output); None where there is none."""

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
    return last_states(model.get_decoder(), batch)


def last_states(decoder: Any, batch: Batch) -> Tensor:
    """What the decoder of a model hands to its output projection, [R, S, H].

    Raises:
        RequestError: the rows are longer than its context.
    """
    check_row_length(
        decoder.config,
        batch["input_ids"].shape[1],
        type(decoder).__name__,
        named="the length of a row (--data.sequence_length)",
    )
    return decoder(
        input_ids=batch["input_ids"],
        attention_mask=document_mask(batch["documents"]),
        position_ids=batch["positions"],
        use_cache=False,
    ).last_hidden_state


def check_row_length(config: Any, tokens: int, whose: str, *, named: str = "--data.sequence_length") -> None:
    """Raise RequestError where rows are longer than a model's context as the decoder counts it.

    A row's mask goes to every layer alike: exact while no layer has anything to forget.

    Args:
        config: the model's.
        tokens: of a row.
        whose: what the message calls the model, and where the recipe names it.
        named: what the message calls the length of a row.
    """
    context, reason = min(context_limits(config.get_text_config(decoder=True)))
    if tokens > context:
        raise RequestError(
            f"{named} is {tokens}; the context of {whose} is {context} tokens{reason}. Lower "
            f"{named} to {context}, or take another model"
        )


def check_start_context(model: ModelConfig, tokens: int) -> None:
    """Raise RequestError where rows are too long for the model to go on from; no weights are read.

    One that is cut from the target has the target's context.
    """
    given = model.start_from
    if given is not None and given != FROM_TARGET:
        check_trainable_model(given)
        check_row_length(load_config(given), tokens, f"model.start_from {given!r}")


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
