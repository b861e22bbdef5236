"""DSpark: a block drafter whose drafts see the token in front of them, by a head of low rank.

DeepSeek-AI 2026. The slots are made in one pass, as DFlash makes them; then the block is walked from left to
right, and what the token in front says of its successor, W2 W1[x], is added to what the slot says. So a draft
is drawn from a distribution that knows the drafted prefix by its last token, and that distribution is the
proposal's q. A walk costs a product of low rank for each draft, and no further pass.

W2 begins at zero: an untrained head leaves the slots as they are. A network may say too how sure it is of a slot:
its confidence is trained to be the chance that the draft is accepted, 1 - TV(p, q), and a draft may end in front of
the first slot that it doubts. It is asked before the slot's token is drawn, of the slot and of the token in front: so
what is dropped depends on nothing that the drawing has settled, and no output changes. Cut by the drawn token's own
probability, drafts that are kept would be the likely ones of q, and q not what they are drawn from.

Read next: `proposer.py`, the slots; `walked.py`, the walk; `trainers/block/student.py`, where the text's own
tokens stand in front.

Shapes: B rows, K drafted tokens, R rank, V vocabulary, U tokens of it that can be drafted, P drafts that count in a
loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...errors import RequestError
from ..layers.draft_vocabulary import DraftHead, ids_of
from ..sizes import check_sizes
from .net import BlockNet, BlockShape
from .walked import WalkedBlock


@dataclass(frozen=True)
class DSparkShape(BlockShape):
    """Sizes of a network with its head."""

    vocabulary: int = 0
    """Of the target."""
    rank: int = 0
    confidence: bool = False
    """Whether it says how sure it is of each slot."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no network can have."""
        super().__post_init__()
        check_sizes(vocabulary=self.vocabulary, rank=self.rank)
        if type(self.confidence) is not bool:
            raise ValueError(f"confidence is {self.confidence!r:.20}; expected true or false")


class MarkovHead(nn.Module):
    """W2 W1[x]: what a token says of its successor."""

    def __init__(self, vocabulary: int, rank: int, drafted: int | None = None) -> None:
        """`drafted`: how many tokens can be successors; None: all."""
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted or vocabulary, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, token: Tensor) -> Tensor:
        """[..., U] of tokens [...]."""
        return self.markov_w2(self.markov_w1(token))


class ConfidenceHead(nn.Module):
    """w [h; W1[x]] + b: the logit of a slot's chance to be accepted behind a token."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, 1)

    def forward(self, slot: Tensor, low: Tensor) -> Tensor:
        """fp32 [...] of slots [..., H] and what the head has of the tokens in front, [..., R]."""
        given = torch.cat((slot, low.to(slot.dtype)), -1)
        return self.proj(given).squeeze(-1).float()


class DSparkNet(BlockNet):
    """DFlash's network and the head."""

    family = "dspark"
    Shape: ClassVar[type[BlockShape]] = DSparkShape
    config: DSparkShape

    def __init__(self, config: DSparkShape, ids: Sequence[int] | None = None) -> None:
        """`ids`: as of `BlockNet`."""
        super().__init__(config, ids)
        self.markov_head = MarkovHead(config.vocabulary, config.rank, config.draft_vocabulary)
        self.confidence_head = ConfidenceHead(config.hidden, config.rank) if config.confidence else None

    def confidence(self, slot: Tensor, token: Tensor) -> Tensor | None:
        """The logit of the chance that a slot's draft is accepted behind a token, [...]; None: it has learnt none.

        Args:
            slot: [..., H], what the projection reads.
            token: [...], in front of the draft.
        """
        if self.confidence_head is None:
            return None
        return self.confidence_head(slot, self.markov_head.markov_w1(token))

    def behind(self, token_P: Tensor) -> tuple[Tensor, Tensor] | None:
        """As in `BlockNet`: [P, R] and [U, R]."""
        return self.markov_head.markov_w1(token_P), self.markov_head.markov_w2.weight


class DSpark(WalkedBlock):
    """Drafts a chain in one pass of the network and a walk."""

    family = "dspark"
    net: DSparkNet

    def __init__(self, net: DSparkNet, target: Backbone, **settings: Any) -> None:
        """`settings` are those of `DFlash`; `least` is of what the drafter has learnt to say.

        Raises:
            RequestError: as for `DFlash`, or the drafter has learnt no confidence.
        """
        super().__init__(net, target, **settings)
        own_U, only_U = ids_of(net), self.head.ids_U
        chosen = None if only_U is None else only_U.tolist()
        self._successors = DraftHead(net.markov_head.markov_w2, target.vocabulary, own=own_U, only=chosen)
        if self.least and net.confidence_head is None:
            raise RequestError(
                f"drafter.confidence is {self.least:g}, and the drafter has learnt no confidence; train one with "
                "dspark.confidence above 0, or leave it out"
            )

    @property
    def weights_read(self) -> list[nn.Module]:
        """As in `DFlash`; of W1 a proposal reads single rows, and W2 for every draft."""
        parts = [each for name, each in self.net.named_children() if name != "markov_head"]
        return [*parts, *self._of_states, *[self._successors.layer] * self.draft_length, self.head.layer]

    def _trusted(self, _logits_BV: Tensor, out_BH: Tensor, token_B: Tensor) -> Tensor:
        """As in `WalkedBlock`, by what the network has learnt to say."""
        logit_B = self.net.confidence(out_BH, token_B)
        assert logit_B is not None  # or `__init__` has refused
        return logit_B.sigmoid() >= self.least

    def _behind(self, _out: Tensor, product: Tensor, token: Tensor) -> Tensor:
        behind = self._successors.product(self.net.markov_head.markov_w1(token))
        return self.head.laid_out(self.head.shaping(product + behind))
