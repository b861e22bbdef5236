"""P-EAGLE's network: EAGLE-3's, some layers deep, that drafts all its tokens in one pass.

P-EAGLE, 2026 (arXiv 2602.01469). Behind the last true pair stand mask pairs: in place of the target's
states, which nobody has yet, a learnt vector that goes through the same `fc`, and in place of the unknown
token's embedding a learnt vector too. A mask pair d places behind the pair of t speaks of x_{t+2+d}, as the true
pair there would. The published drafter trains an embedding of the whole vocabulary to have a mask among its
rows; here the embedding stays the target's, frozen, and the mask's alone is learnt: H numbers instead of V H,
whose moments would outweigh the drafter.

Training attends over a text of true pairs, and branches of mask pairs behind some of them. A mask pair (t, d) stands d
places behind the anchor t. It sees the true pairs of its document up to t, and of the mask pairs those of its own
branch up to itself; true pairs see no mask pair. So the text is attended as ever (`../layers/passes.py`), and what a
mask pair makes of its own branch joins its softmax over the text as one more key, a sink (`../layers/sinks.py`).

Read next: `parallel.py`, which decodes; `trainers/block/peagle.py`, which trains.

Shapes: B rows, N pairs, S true pairs of a row, A anchors of a row, M mask pairs of a row
(those of depth 1 first), Q query heads, G key-value heads, D head size, H hidden size, F numbers of the fused states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ...decoding.backbone.kv_cache import KVCache
from ...decoding.on_host import on_host
from ..layers.llama import Attention, FeedForward, Norm, Projected, embedding_spread
from ..layers.passes import Passes
from ..layers.sinks import Keys, SunkContext, own_keys
from ..layers.static import again
from ..sizes import check_parts, check_sizes
from .net3 import Eagle3Net, Eagle3Shape


@dataclass(frozen=True)
class PeagleShape(Eagle3Shape):
    """Sizes of a network that drafts in one pass."""

    decoder_layers: int = 1
    """The first reads pairs, twice as wide; the others what the one before has made."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no network can have."""
        super().__post_init__()
        check_sizes(decoder_layers=self.decoder_layers)
        check_parts(self.decoder_layers, f"{self.decoder_layers} layers")
        if self.feature_norms or self.output_norm:
            raise ValueError("feature_norms or output_norm is true; expected false: no output is fed back")


class DeeperLayer(nn.Module):
    """A Llama layer behind the first one."""

    def __init__(self, shape: PeagleShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape, shape.hidden, query_norm=shape.head_norms)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape)


class PeagleNet(Eagle3Net):
    """The drafter of P-EAGLE; without mask pairs and with one layer it is EAGLE-3's, to the bit."""

    family = "peagle"
    Shape: ClassVar[type[Eagle3Shape]] = PeagleShape
    config: PeagleShape

    def __init__(self, config: PeagleShape, ids: Sequence[int] | None = None) -> None:
        """`ids`: as of `Eagle3Net`."""
        super().__init__(config, ids)
        self.deeper = nn.ModuleList(DeeperLayer(config) for _ in range(config.decoder_layers - 1))
        # layers of their own and no bare weights: what shards weights gathers those of layers
        self.mask_hidden = nn.Embedding(1, config.fused)
        self.mask_embedding = nn.Embedding(1, config.hidden)

    @classmethod
    def for_target(cls, target: nn.Module, *, ids: Sequence[int], **chosen: Any) -> Self:
        """As of `Eagle3Net`; the mask's embedding begins as loud as a token's."""
        made = super().for_target(target, ids=ids, **chosen)
        with torch.no_grad():
            made.mask_embedding.weight.mul_(embedding_spread(target).to(made.mask_embedding.weight.device))
        return made

    def mask(self) -> tuple[Tensor, Tensor]:
        """What stands in place of the target's states [1, 1, F] and of an embedding [1, 1, H]: all masks are alike."""
        first_11 = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        return self.mask_hidden(first_11), self.mask_embedding(first_11)

    def forward(
        self,
        hidden_BNH: Tensor,
        embeds_BNH: Tensor,
        positions_BN: Tensor,
        mask: Tensor | None,
        kv_cache: KVCache | None = None,
    ) -> Tensor:
        """As `PairNet.forward`, through all layers."""
        turn = self.rotary(positions_BN)
        residual_BNH, read_BNX = self.enter(hidden_BNH, embeds_BNH)
        out_BNH = self.finish(residual_BNH, self.attention(read_BNX, turn, mask, kv_cache))
        for number, layer in enumerate(self._deeper, 1):
            read_BNH = layer.input_layernorm(out_BNH)
            out_BNH = _ended(layer, out_BNH + layer.self_attn(read_BNH, turn, mask, kv_cache, number))
        return out_BNH

    def drafts(
        self,
        hidden_BSH: Tensor,
        embeds_BSH: Tensor,
        positions_BS: Tensor,
        documents_BS: Tensor,
        at_BA: Tensor,
        counts: Sequence[int],
        *,
        masked: bool = True,
        recompute: bool = False,
    ) -> list[Tensor]:
        """The outputs of many drafts along packed rows, as training needs them: of depth 0, 1, ...

        Of depth 0 those of all true pairs, [B, S, H]; of depth d those d places behind the first `counts[d - 1]`
        anchors, [B, counts[d - 1], H]. The output of depth d at t speaks of x_{t+2+d}.

        Args:
            hidden_BSH: fused states.
            embeds_BSH: embedding of x_{t+1}.
            positions_BS: t, counted from the first token of the document.
            documents_BS: number of the document that a pair belongs to; it sees no other.
            at_BA: which true pairs are anchors, those of the longest branches first.
            counts: how many of them have a mask pair of depth 1, 2, ...
            masked: make a mask of mask pairs by text, which is faster where it is small.
            recompute: keep of each layer what it reads alone, and compute it again for its gradient; no bit of any
                number differs.
        """
        (B, S), M = documents_BS.shape, sum(counts)
        hidden_BNH, embeds_BNH, positions_BN = hidden_BSH, embeds_BSH, positions_BS
        if M:
            states_11F, mask_11H = self.mask()
            own_BMH, mask_BMH = (x_11H.expand(B, M, -1) for x_11H in (self.fuse(states_11F), mask_11H))
            places = [positions_BS.gather(1, at_BA[:, :count]) + d for d, count in enumerate(counts, 1)]
            hidden_BNH = torch.cat((hidden_BSH, own_BMH), 1)
            embeds_BNH = torch.cat((embeds_BSH.to(mask_BMH.dtype), mask_BMH), 1)
            positions_BN = torch.cat((positions_BS, *places), 1)
        branches = Branches(documents_BS, at_BA, counts, self.attention.group, masked=masked)
        turn = self.rotary(positions_BN)
        out_BNH = again(self._first, recompute)(hidden_BNH, embeds_BNH, turn, branches)
        for layer in self._deeper:
            out_BNH = again(_next, recompute)(layer, out_BNH, turn, branches)
        return list(out_BNH.split((S, *counts), 1))

    def _first(
        self, hidden_BNH: Tensor, embeds_BNH: Tensor, turn: tuple[Tensor, Tensor], branches: Branches
    ) -> Tensor:
        """The first layer over pairs, [B, N, H]."""
        residual_BNH, read_BNX = self.enter(hidden_BNH, embeds_BNH)
        attended = branches.attend(self.attention.project(read_BNX, turn))
        return self.finish(residual_BNH, self.attention.joined(attended))

    @property
    def _deeper(self) -> Sequence[Any]:
        return list(self.deeper)


def _next(layer: Any, out_BNH: Tensor, turn: tuple[Tensor, Tensor], branches: Branches) -> Tensor:
    """A layer behind the first over pairs, [B, N, H]."""
    attended = branches.attend(layer.self_attn.project(layer.input_layernorm(out_BNH), turn))
    return _ended(layer, out_BNH + layer.self_attn.joined(attended))


def _ended(layer: Any, hidden_BNH: Tensor) -> Tensor:
    """The layer's feed-forward part, [B, N, H]."""
    return hidden_BNH + layer.mlp(layer.post_attention_layernorm(hidden_BNH))


class Branches:
    """What the true pairs and the mask pairs of some rows see, for every layer alike."""

    def __init__(
        self, documents_BS: Tensor, at_BA: Tensor, counts: Sequence[int], group: int, *, masked: bool = True
    ) -> None:
        """The pairs of depth d are behind the first `counts[d - 1]` anchors of a row, so counts never grow.

        Args:
            documents_BS: number of every true pair's document.
            at_BA: the true pair that each anchor is.
            group: query heads of a key's head.
            masked: make the mask of mask pairs by text; else they attend block after block.
        """
        self._text, self._counts, self._group = Passes(documents_BS, group), tuple(counts), group
        # a mask is made on the device; spans are counted on the host, which knows where anchors are
        anchor_BM = _of_masks(at_BA if masked else on_host(at_BA), self._counts)
        self._context = SunkContext(documents_BS, anchor_BM, behind=1, masked=masked)

    def attend(self, pairs: Projected) -> Tensor:
        """Attention of S true pairs and, behind them, M mask pairs: [B, Q, S + M, D]."""
        M = sum(self._counts)
        S = pairs.query_BQND.shape[2] - M
        text = Projected(*(x[:, :, :S] for x in pairs))
        out_BQSD = self._text.first(text)
        if not M:
            return out_BQSD
        masks = Projected(*(x[:, :, S:] for x in pairs))
        own_BQMD, total_BQM = self._own(masks)
        texts = Keys(text.key_BGND, text.value_BGND)
        both_BQMD = self._context.attend(masks.query_BQND, texts, own_BQMD, total_BQM, self._group)
        return torch.cat((out_BQSD, both_BQMD), 2)

    def _own(self, masks: Projected) -> tuple[Tensor, Tensor]:
        """What mask pairs make of their own branch [B, Q, M, D], and the log-sum-exp of its scores [B, Q, M]."""
        queries, keys, values = (x.split(self._counts, 2) for x in masks)
        outs, totals = [], []
        for d, count in enumerate(self._counts):
            # the first anchors have the longest branches: a shallower pair of the same one has the same place
            branch = [Keys(keys[j][:, :, :count], values[j][:, :, :count]) for j in range(d + 1)]
            out, total = own_keys(queries[d], branch, self._group)
            outs.append(out)
            totals.append(total)
        return torch.cat(outs, 2), torch.cat(totals, 2)


def _of_masks(at_BA: Tensor, counts: Sequence[int]) -> Tensor:
    """The anchor of every mask pair, those of depth 1 first, [B, M]."""
    return torch.cat([at_BA[:, :count] for count in counts], 1) if counts else at_BA[:, :0]
