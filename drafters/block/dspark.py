"""DSpark: a block drafter whose drafts see the token in front of them, by a head of low rank.

DeepSeek-AI 2026. The slots are made in one pass, as DFlash makes them; then the block is walked from left to
right, and what the token in front says of its successor, W2 W1[x], is added to what the slot says. So a draft
is drawn from a distribution that knows the drafted prefix by its last token, and that distribution is the
proposal's q. A walk costs a product of low rank for each draft, and no further pass.

W2 begins at zero: an untrained head leaves the slots as they are. Read next: `proposer.py`, the slots;
`trainers/block/student.py`, where the text's own tokens stand in front.

Shapes: B rows, K drafted tokens, R rank, V vocabulary, P drafts that count in a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...decoding.proposal import Proposal
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper, draw
from ..sizes import check_sizes
from ..temperatures import at_depth
from .net import BlockNet, BlockShape
from .proposer import DFlash


@dataclass(frozen=True)
class DSparkShape(BlockShape):
    """Sizes of a network with its head."""

    vocabulary: int = 0
    """Of the target."""
    rank: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no network can have."""
        super().__post_init__()
        check_sizes(vocabulary=self.vocabulary, rank=self.rank)


class MarkovHead(nn.Module):
    """W2 W1[x]: what a token says of its successor."""

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, token: Tensor) -> Tensor:
        """[..., V] of tokens [...]."""
        return self.markov_w2(self.markov_w1(token))


class DSparkNet(BlockNet):
    """DFlash's network and the head."""

    family = "dspark"
    Shape: ClassVar[type[BlockShape]] = DSparkShape
    config: DSparkShape

    def __init__(self, config: DSparkShape) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config.vocabulary, config.rank)

    def behind(self, token_P: Tensor) -> tuple[Tensor, Tensor] | None:
        """As in `BlockNet`: [P, R] and [V, R]."""
        return self.markov_head.markov_w1(token_P), self.markov_head.markov_w2.weight


class DSpark(DFlash):
    """Drafts a chain in one pass of the network and a walk."""

    family = "dspark"
    net: DSparkNet

    @property
    def weights_read(self) -> list[nn.Module]:
        """As in `DFlash`; of W1 a proposal reads single rows, and W2 for every draft."""
        parts = [each for name, each in self.net.named_children() if name != "markov_head"]
        head = self._target.model.get_output_embeddings()
        return [*parts, *self._of_states, *[self.net.markov_head.markov_w2] * self.draft_length, head]

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Draft after `last_B`, each row's anchor."""
        product_BKV = self._product(self._block(last_B))
        random_BK = None if self._argmax(warper) else uniforms.take(self.draft_length)
        tokens, q = [last_B], []
        for k, product_BV in enumerate(product_BKV.unbind(1)):
            logits_BV = self._behind(product_BV, tokens[-1])
            if random_BK is None:
                tokens.append(logits_BV.argmax(-1))
                continue
            q.append(at_depth(warper, self.factors, k)(logits_BV))
            tokens.append(draw(q[-1], random_BK[:, k]))
        return self._proposal(torch.stack(tokens, 1), torch.stack(q, 1) if q else None)

    def _behind(self, product: Tensor, token: Tensor) -> Tensor:
        return self._shaping(product + self.net.markov_head(token).float())
