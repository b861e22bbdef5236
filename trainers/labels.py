"""Which positions have a label, one token ahead or several, shared by all methods.

Read next: `distill.py`, one token ahead; `heads.py` and `student/compared.py`, several.

Shapes: R rows, S tokens of a row, X positions that have a token so far ahead, P of them with a label, H hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..decoding.on_host import on_host, places
from ..errors import RequestError
from .loop.objective import Batch
from .recipe import TrainingRecipe


def check_in_rows(recipe: TrainingRecipe, drafts: int, counted_by: str, *, first: int = 2) -> None:
    """Raise RequestError for more drafts than a row has labels for.

    Args:
        counted_by: the field that says how many drafts are learnt behind one place.
        first: the token of a row that its first draft speaks of; behind a state of the target it is the third.
    """
    most = recipe.row_tokens - first
    if drafts > most:
        raise RequestError(
            f"{counted_by} asks for {drafts} drafts behind a place of the text, and a row of {recipe.row_tokens} "
            f"tokens has labels for {most} at most: the last ones would never be trained; lower it, or take longer "
            "rows (data.sequence_length)"
        )


def has_label(batch: Batch, ahead: int) -> Tensor:
    """Positions t whose token t + `ahead` counts in the loss and is of t's own document.

    bool [R, X], X = S - `ahead`; in a row no longer than that there is none. Medusa's head k speaks
    of t + k + 1; EAGLE's output at t has seen token t + 1 and speaks of t + 2.
    """
    return _has_label(batch["documents"], batch["loss_mask"], ahead)


def label_places(batch: Batch, ahead: int, own: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Where `has_label` is true, rows and positions [P], counted on the host, which need not wait for them.

    Args:
        own: the positions of every row that are asked for; places are counted from its start.
    """
    counts_RX = _has_label(on_host(batch["documents"]), on_host(batch["loss_mask"]), ahead)
    row_P, at_P = places(counts_RX[:, own], batch["documents"].device)
    return row_P, at_P


def _has_label(documents_RS: Tensor, loss_mask_RS: Tensor, ahead: int) -> Tensor:
    same_RX = documents_RS[:, ahead:] == documents_RS[:, :-ahead]
    return loss_mask_RS[:, ahead:] & same_RX


class Labelled(NamedTuple):
    """The hidden states that predict a label, and the labels."""

    hidden_PH: Tensor
    label_P: Tensor


def labelled(hidden_RSH: Tensor, batch: Batch) -> Labelled:
    """Position t with the token at t + 1 as its label, where that token counts in the loss."""
    place = in_front_of_labels(batch)
    return Labelled(hidden_RSH[:, :-1][place], batch["input_ids"][:, 1:][place])


def at_labels(value_RS: Tensor, batch: Batch) -> Tensor:
    """What a batch says of each of its tokens, at the labels alone, [P]."""
    return value_RS[:, 1:][in_front_of_labels(batch)]


def label_shares(batch: Batch) -> Tensor | None:
    """The weight of each labelled position, fp32 [P], from the batch's `share`; None: all equal."""
    share_RS = batch.get("share")
    return None if share_RS is None else at_labels(share_RS, batch)


def in_front_of_labels(batch: Batch) -> tuple[Tensor, ...]:
    """Rows and positions [P] in front of the tokens that count, found on the host, which need not wait for them."""
    return places(on_host(batch["loss_mask"])[:, 1:], batch["loss_mask"].device)
