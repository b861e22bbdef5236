"""What a student is asked that learns along its own drafts, and what it is given of them.

Read next: `compared.py` and `../heads.py`, students; `../own_drafts/objective.py`, which asks.

Shapes: X places, J drafts behind one, T = J + 1 tokens of a root and its drafts, C places of a chunk, U tokens that
can be drafted, H hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from ...drafters.layers.static import StaticParts
from ..loop.objective import Batch
from ..losses.chunked import ChunkedLoss

Draw = Callable[[Tensor], Tensor]
"""What a network puts out for the next draft of every place, [X, H] -> that draft, int64 [X]."""


class Where(Protocol):
    """Places of some rows (`own_drafts/places.py`)."""

    @property
    def at_RA(self) -> Tensor: ...
    @property
    def row_X(self) -> Tensor: ...
    @property
    def number_X(self) -> Tensor: ...
    @property
    def at_X(self) -> Tensor: ...


class Drafted(NamedTuple):
    """Own drafts behind some places, with what the target says of them."""

    token_XT: Tensor
    """int64: a root and its drafts."""
    label_XJ: Tensor
    """int64: what terms take for the label of a draft: the target's likeliest token; where the accepted length is
    learnt the draft itself."""
    known_XJ: Tensor
    """bool: whether a draft counts; behind an end of the text none does."""
    states_XTH: Tensor
    """The target's last hidden states at the root and behind each draft; zeros behind the last."""
    share_XJ: Tensor
    """fp32: how much each counts in the loss; [X, J, 2] as `ChunkedLoss` takes it."""
    kept_XJ: Tensor
    """fp32: how often it is kept where decoding gets to it."""


class DraftsBehind(StaticParts):
    """A student that can draft as decoding does, and learn along its drafts."""

    drafts_made: int
    """J, how many it drafts behind a place."""
    drafts_likeliest: ClassVar[bool] = False
    """Whether it drafts its likeliest tokens at every temperature, as heads do."""

    @property
    @abstractmethod
    def judge(self) -> ChunkedLoss:
        """A projection that drafts, with its chunk."""

    @property
    @abstractmethod
    def ids_U(self) -> Tensor | None:
        """The tokens that can be drafted; None: all."""

    @property
    def first_weight(self) -> float:
        """What the first draft behind a place of a text counts in the loss."""
        return 1.0

    @abstractmethod
    def draft_logits(self, hidden_CH: Tensor, before_C: Tensor, j: int) -> Tensor:
        """fp32 logits [C, U] that the j-th draft, from 0, is drawn by, without a gradient.

        Args:
            hidden_CH: what the projection reads.
            before_C: the tokens in front.
        """

    def drafts_behind(self, batch: Batch, given: Any, places: Where, draw: Draw, embed: Any) -> Any:
        """What `loss_along` takes of the drafts behind some places, with a gradient: what the projection reads of
        them, [X, J, H], or what that is made of. Gradients have to come in the order in which a text's come: DeepSpeed
        adds them up over processes in that order, and another process may learn from text.

        Args:
            given: the teacher output of the batch.
            draw: called once for each of the J, in turn.
            embed: the target's embedding.
        """
        raise NotImplementedError(f"{type(self).__name__} does not learn along its own drafts")

    @abstractmethod
    def loss_along(self, found: Any, made: Drafted, given: Any) -> Tensor:
        """The loss of these drafts, summed as they count; `found`: of `drafts_behind`."""
