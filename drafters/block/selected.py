"""DFlash 2: a block drafter that picks among each slot's likeliest tokens by the token in front.

z-lab 2026. Slots are made in one pass, as DFlash makes them, with a convolution around every sublayer.
Then the block is walked from left to right: of the best C tokens b of slot k, behind the token u,

    S_k(u, b) = U_k(b) + < A[u] * (W h_k), Bc[b] >

where U is what the target's projection says of the slot, and A and Bc are tables of low rank. A draft is drawn from
the softmax of S over those C tokens: q has zeros everywhere else, and knows the drafted prefix by its last token.
Given as q, the softmax of U alone would be another distribution than the one that drafts. Bc begins at zero, so a new
selector changes no order.

The convolution runs along a block's slots, its kernel part fixed and part made of the slot itself: one stands around
attention and one around the feed-forward part of every layer: slots of a block hold the same mask, and what tells them
apart is where they stand. With y the sublayer's normed input and two taps,

    in_t  = sum_tap (base[0, tap] + D_in[t, tap]) y_{t - tap}
    out_t = sum_tap (base[1, tap] + D_out[t, tap]) s_{t - tap},   s = sublayer(in)

and [D_in, D_out] = P y, a number for each tap and group of channels. A tap reads zero across the beginning of its
block: what stands beside a block in a packed row never enters it. At the start base is 1 at tap 0 and P is zero, so a
new convolution changes nothing. The target's states go through none.
Shapes: R rows, N slots, A blocks of a row, B slots of a block, H hidden size, G groups of channels, T taps.

Read next: `proposer.py`, the slots; `walked.py`, the walk; `dspark.py`, one over all tokens;
`trainers/block/dflash2.py`, the loss.

Shapes: B rows, K drafted tokens, k nodes, C candidates of a slot, r rank, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...errors import RequestError
from ..layers.draft_vocabulary import ids_of, places_in
from ..sizes import check_sizes
from .attention import View
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

    def __init__(self, hidden: int, vocabulary: int, rank: int, drafted: int | None = None) -> None:
        """`drafted`: how many tokens can be candidates; None: all."""
        super().__init__()
        self.predecessor_codebook = nn.Embedding(vocabulary, rank)
        self.successor_codebook = nn.Embedding(drafted or vocabulary, rank)
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        nn.init.normal_(self.predecessor_codebook.weight, std=rank**-0.5)
        nn.init.zeros_(self.successor_codebook.weight)

    def forward(self, token: Tensor, slot: Tensor, best: Tensor) -> Tensor:
        """[..., C] in the weights' precision.

        Args:
            token: [...], the tokens in front.
            slot: [..., H], what the projection reads.
            best: [..., C], the candidates, as indices in the draft vocabulary where there is one.
        """
        asked = self.predecessor_codebook(token) * self.hidden_projection(slot)
        return (self.successor_codebook(best) @ asked[..., None]).squeeze(-1)


class DFlash2Net(BlockNet):
    """DFlash's network with convolutions, and the selector."""

    family = "dflash2"
    Shape: ClassVar[type[BlockShape]] = DFlash2Shape
    Layer: ClassVar[type[BlockLayer]] = DFlash2Layer
    config: DFlash2Shape

    def __init__(self, config: DFlash2Shape, ids: Sequence[int] | None = None) -> None:
        """`ids`: as of `BlockNet`."""
        super().__init__(config, ids)
        sizes = (config.hidden, config.vocabulary, config.rank, config.draft_vocabulary)
        self.candidate_selector = CandidateSelector(*sizes)


class DFlash2(WalkedBlock):
    """Drafts a chain in one pass of the network and a walk over candidates."""

    family = "dflash2"
    net: DFlash2Net

    def __init__(self, net: DFlash2Net, target: Backbone, **settings: Any) -> None:
        """`settings` are those of `DFlash`."""
        super().__init__(net, target, **settings)
        own_U, ids_U = ids_of(net), self.head.ids_U
        self._rows_U = ids_U if own_U is None or ids_U is None else places_in(own_U, ids_U)

    @property
    def weights_read(self) -> list[nn.Module]:
        """As in `DFlash`; of the selector's tables a proposal reads single rows."""
        selector = self.net.candidate_selector
        parts = [each for name, each in self.net.named_children() if name != "candidate_selector"]
        projections = [selector.hidden_projection] * self.draft_length
        return [*parts, *self._of_states, *projections, self.head.layer]

    def _behind(self, out: Tensor, product: Tensor, token: Tensor) -> Tensor:
        """As in `DFlash`: S of the best candidates, -inf elsewhere."""
        logits = self.head.shaping(product)
        top = logits.topk(min(self.net.config.candidates, self.head.draftable))
        # of a projection that is cut further than the tables are, the tables' own rows
        best = top.indices if self._rows_U is None else self._rows_U[top.indices]
        score = top.values + self.net.candidate_selector(token, out, best).float()
        return self.head.laid_out(torch.full_like(logits, -torch.inf).scatter(-1, top.indices, score))


def check_tree(children: int, candidates: int) -> None:
    """Raise RequestError for a tree whose nodes have more children than a slot has candidates."""
    if children > candidates:
        raise RequestError(
            f"drafter.block.children is {children}, and the drafter chooses among {candidates} tokens of a slot; "
            "lower it"
        )


class GroupedConv(nn.Module):
    """The two convolutions around a sublayer."""

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        """`group`: channels that share what a slot adds to the kernel; it divides `hidden`."""
        super().__init__()
        self.taps, self.groups = taps, hidden // group
        base_2TH = torch.zeros(2, taps, hidden)
        base_2TH[:, 0] = 1
        self.base_kernel = nn.Parameter(base_2TH)
        self.kernel_projection = nn.Linear(hidden, 2 * taps * self.groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, y_RNH: Tensor, sublayer: Callable[[Tensor], Tensor], block: int) -> Tensor:
        """What the sublayer makes of the mixed slots, mixed again: [R, N, H].

        Args:
            y_RNH: normed; N is a multiple of `block`.
            block: slots of a block, B.
        """
        delta = self.kernel_projection(y_RNH).unflatten(-1, (2, self.taps, self.groups))
        mixed_RNH = self._mixed(y_RNH, delta[..., 0, :, :], 0, block)
        return self._mixed(sublayer(mixed_RNH), delta[..., 1, :, :], 1, block)

    def _mixed(self, x_RNH: Tensor, delta_RNTG: Tensor, side: int, block: int) -> Tensor:
        kernel_TGg = self.base_kernel[side].unflatten(-1, (self.groups, -1))
        x_RABGg = x_RNH.unflatten(-1, (self.groups, -1)).unflatten(1, (-1, block))
        delta_RABTG = delta_RNTG.unflatten(1, (-1, block))
        out = (kernel_TGg[0] + delta_RABTG[..., 0, :, None]) * x_RABGg
        for tap in range(1, min(self.taps, block)):
            before = F.pad(x_RABGg[:, :, :-tap], (0, 0, 0, 0, tap, 0))
            out = out + (kernel_TGg[tap] + delta_RABTG[..., tap, :, None]) * before
        return out.flatten(-2).flatten(1, 2)
