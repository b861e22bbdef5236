"""DFlash 2: a block drafter that picks among each slot's likeliest tokens by the token in front.

z-lab 2026. Slots are made in one pass, as DFlash makes them, with a convolution around every sublayer (`conv.py`).
Then the block is walked from left to right: of the best C tokens b of slot k, behind the token u,

    S_k(u, b) = U_k(b) + < A[u] * (W h_k), Bc[b] >

where U is what the target's projection says of the slot, and A and Bc are tables of low rank. A draft is drawn from
the softmax of S over those C tokens: q has zeros everywhere else, and knows the drafted prefix by its last token.
Given as q, the softmax of U alone would be another distribution than the one that drafts. Bc begins at zero, so a new
selector changes no order.

Read next: `proposer.py`, the slots; `walked.py`, the walk; `dspark.py`, one over all tokens;
`trainers/block/dflash2.py`, the loss.

Shapes: B rows, K drafted tokens, k nodes, C candidates of a slot, r rank, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...errors import RequestError
from ..sizes import check_sizes
from .attention import View
from .conv import GroupedConv
from .net import BlockLayer, BlockNet, BlockShape
from .walked import WalkedBlock


@dataclass(frozen=True)
class DFlash2Shape(BlockShape):
    """Sizes of a network with its convolutions and its selector."""

    vocabulary: int = 0
    """Of the target."""
    rank: int = 0
    candidates: int = 0
    """Tokens of a slot that can be drafted, C."""
    taps: int = 2
    group: int = 16
    """Channels that share what a slot adds to a convolution's kernel."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no network can have."""
        super().__post_init__()
        check_sizes(
            vocabulary=self.vocabulary, rank=self.rank, candidates=self.candidates, taps=self.taps, group=self.group
        )
        if self.candidates > self.vocabulary or self.hidden % self.group:
            raise ValueError(
                f"candidates {self.candidates} of a vocabulary of {self.vocabulary}, groups of {self.group} in "
                f"{self.hidden} numbers; expected no more candidates than tokens, and groups that divide that"
            )


class DFlash2Layer(BlockLayer):
    """A layer with convolutions around attention and feed-forward."""

    def __init__(self, shape: DFlash2Shape) -> None:
        super().__init__(shape)
        self.size = shape.size
        self.attention_conv = GroupedConv(shape.hidden, shape.taps, shape.group)
        self.mlp_conv = GroupedConv(shape.hidden, shape.taps, shape.group)

    def forward(self, x_RNH: Tensor, turn: tuple[Tensor, Tensor], view: View, layer: int) -> Tensor:
        """As in `BlockLayer`."""
        block = min(self.size, x_RNH.shape[1])  # a causal block is cut to what is drafted

        def attend(mixed_RNH: Tensor) -> Tensor:
            return self.self_attn(mixed_RNH, turn, view, layer)

        x_RNH = x_RNH + self.attention_conv(self.input_layernorm(x_RNH), attend, block)
        return x_RNH + self.mlp_conv(self.post_attention_layernorm(x_RNH), self.mlp, block)


class CandidateSelector(nn.Module):
    """What a token says of a slot's candidates: < A[u] * (W h), Bc[b] >."""

    def __init__(self, hidden: int, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(vocabulary, rank)
        self.successor_codebook = nn.Embedding(vocabulary, rank)
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        nn.init.normal_(self.predecessor_codebook.weight, std=rank**-0.5)
        nn.init.zeros_(self.successor_codebook.weight)

    def forward(self, token: Tensor, slot: Tensor, best: Tensor) -> Tensor:
        """[..., C] in the weights' precision.

        Args:
            token: [...], the tokens in front.
            slot: [..., H], what the projection reads.
            best: [..., C], the candidates.
        """
        asked = self.predecessor_codebook(token) * self.hidden_projection(slot)
        return (self.successor_codebook(best) @ asked[..., None]).squeeze(-1)


class DFlash2Net(BlockNet):
    """DFlash's network with convolutions, and the selector."""

    family = "dflash2"
    Shape: ClassVar[type[BlockShape]] = DFlash2Shape
    Layer: ClassVar[type[BlockLayer]] = DFlash2Layer
    config: DFlash2Shape

    def __init__(self, config: DFlash2Shape) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config.hidden, config.vocabulary, config.rank)


class DFlash2(WalkedBlock):
    """Drafts a chain in one pass of the network and a walk over candidates."""

    family = "dflash2"
    net: DFlash2Net

    @property
    def weights_read(self) -> list[nn.Module]:
        """As in `DFlash`; of the selector's tables a proposal reads single rows."""
        selector = self.net.candidate_selector
        parts = [each for name, each in self.net.named_children() if name != "candidate_selector"]
        projections = [selector.hidden_projection] * self.draft_length
        return [*parts, *self._of_states, *projections, self._target.model.get_output_embeddings()]

    def _behind(self, out: Tensor, product: Tensor, token: Tensor) -> Tensor:
        """As in `DFlash`: S of the best candidates, -inf elsewhere."""
        logits = self._shaping(product)
        top = logits.topk(self.net.config.candidates)
        score = top.values + self.net.candidate_selector(token, out, top.indices).float()
        return torch.full_like(logits, -torch.inf).scatter(-1, top.indices, score)


def check_tree(children: int, candidates: int) -> None:
    """Raise RequestError for a tree whose nodes have more children than a slot has candidates."""
    if children > candidates:
        raise RequestError(
            f"drafter.block_children is {children}, and the drafter chooses among {candidates} tokens of a slot; "
            "lower it"
        )
