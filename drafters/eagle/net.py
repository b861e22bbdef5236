"""The networks of the EAGLE family: what they share, and EAGLE-1's, one layer over features.

What is trained is what decodes: training calls `unroll`, decoding `forward` with a KV cache, and both
run the same parts. Embedding and output projection are the target's, passed in and never saved.
Read next: `../layers/passes.py`, attention in training; `net3.py`, EAGLE-3's network; `proposer.py`,
which decodes; `trainers/eagle.py`, which trains.

Shapes: B rows, N pairs (a hidden state and the embedding of the token after it), H hidden size,
S pairs of a whole row where it is cut over processes, X width of what attention reads, T keys in view, Q query heads,
D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...decoding.backbone.kv_cache import KVCache
from ...decoding.backbone.stacked import SharedInputLinears
from ..layers.draft_vocabulary import check_size, count_of, hold
from ..layers.llama import Attention, FeedForward, LayerShape, Norm, Projected, Rotary
from ..layers.passes import Passes, Sunk
from ..layers.row_split import WHOLE, RowSplit
from ..layers.sinks import Keys
from ..layers.static import StaticParts, again


class PairNet(StaticParts, ABC):
    """One decoder layer over pairs (hidden state of t, embedding of x_{t+1}).

    A network says what its layer reads of a pair (`enter`), which attention it has, and what it
    makes of the result (`finish`); its output at t predicts x_{t+2}, and is used as the hidden
    state of t + 1 where the target has none.
    """

    rotary: Rotary
    fc: nn.Linear

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.fc.weight.device

    @property
    @abstractmethod
    def attention(self) -> Attention:
        """The layer's attention."""

    @abstractmethod
    def fuse(self, features_BNF: Tensor) -> Tensor:
        """What the layer takes of the target's hidden states, [B, N, H]."""

    def shown(self, embeds_BNH: Tensor, _positions_BN: Tensor) -> Tensor:
        """The embeddings that pairs are made of, [B, N, H]: as given, where a network leaves none out."""
        return embeds_BNH

    @abstractmethod
    def enter(self, hidden_BNH: Tensor, embeds_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """The residual [B, N, H], and the input of attention [B, N, X]."""

    @abstractmethod
    def finish(self, residual_BNH: Tensor, attended_BNH: Tensor) -> Tensor:
        """The output, [B, N, H]."""

    def forward(
        self,
        hidden_BNH: Tensor,
        embeds_BNH: Tensor,
        positions_BN: Tensor,
        mask: Tensor | None,
        kv_cache: KVCache | None = None,
    ) -> Tensor:
        """The outputs, [B, N, H].

        Args:
            hidden_BNH: fused states of the target, or earlier outputs.
            embeds_BNH: the target's embedding of the token after, x_{t+1}.
            positions_BN: t, counted from the first token of the document.
            mask: bool, broadcastable to [B, 1, N, T]; None is causal.
            kv_cache: where keys and values are kept, aimed by the caller; None in training.
        """
        residual_BNH, read_BNX = self.enter(hidden_BNH, self.shown(embeds_BNH, positions_BN))
        return self.finish(residual_BNH, self.attention(read_BNX, self.rotary(positions_BN), mask, kv_cache))

    def unroll(
        self,
        hidden_BNH: Tensor,
        embeds_BNH: Tensor,
        positions_BS: Tensor,
        documents_BS: Tensor,
        passes: int,
        *,
        detach: bool = False,
        recompute: bool = False,
        split: RowSplit = WHOLE,
        own: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        """The outputs of several passes, each fed with the one before: as drafting will.

        Pass j puts the true token x_{t+1+j} beside the output of pass j - 1 at t, at position
        t + j. It sees the first pass's keys up to t, and of the later passes' keys those at t
        alone: what a draft that begins after t would hold. What does not depend on where documents end, all but
        attention inside of them, goes through `static`.

        Args:
            hidden_BNH: fused states.
            embeds_BNH: embedding of x_{t+1}; rolled on by one token in every pass.
            positions_BS: t, of whole rows.
            documents_BS: number of the document that a pair belongs to; it sees no other. Of whole rows.
            detach: no gradient through what is fed back.
            recompute: keep of each pass its output, keys and values alone, and compute it again for its
                gradient; no bit of any number differs.
            split: the part of each row that is given and computed here, while others compute the rest; the
                embeddings go on behind it by as many tokens as there are passes (`RowSplit.held`). Its group
                goes through here, and through the gradient, together.
            own: called with the output of each pass but the last, gives the embeddings [B, N, H] that the next pass
                reads in place of the text's: of tokens that are drafted.
        """
        outputs: list[Tensor] = []
        if passes < 1:
            return outputs
        embeds_BNH = self.shown(embeds_BNH, positions_BS[:, split.held(positions_BS.shape[1], passes)])
        attention = Passes(documents_BS, self.attention.group, split, self.static)
        positions_BN = positions_BS[:, split.own(positions_BS.shape[1])]
        sunk: Sunk | None = None
        between: list[Keys] = []
        for j in range(passes):
            ahead = j
            if own is not None and j:
                embeds_BNH, ahead = own(outputs[-1]), 0
            # with what there is now: the backward pass comes later
            run = partial(self._pass, attention, j, ahead, tuple(between))
            out_BNH, *kept = again(run, recompute)(hidden_BNH, embeds_BNH, positions_BN, sunk)
            if j == 0 and passes > 1:
                sunk = attention.sunk(Keys(*kept))
            elif j > 0:
                between.append(Keys(*kept))
            outputs.append(out_BNH)
            hidden_BNH = out_BNH.detach() if detach else out_BNH
        return outputs

    def _pass(
        self,
        attention: Passes,
        j: int,
        ahead: int,
        between: tuple[Keys, ...],
        hidden_BNH: Tensor,
        embeds_BNH: Tensor,
        positions_BN: Tensor,
        sunk: Sunk | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pass j of `unroll`, the embeddings lying so far ahead: its output, keys and values, the first one's of whole
        rows."""
        embeds_BNH = embeds_BNH.roll(-ahead, 1)[:, : hidden_BNH.shape[1]]
        enter = self.static("the way into attention", PairNet._into)
        leave = self.static("the way out of it", PairNet._out_of)
        residual_BNH, read_BNX, pairs = enter(self, hidden_BNH, embeds_BNH, self.rotary(positions_BN + j))
        if sunk is None:
            pairs = attention.gathered(pairs)
        attended = attention.first(pairs) if sunk is None else attention.later(pairs, sunk, between)
        return leave(self, residual_BNH, attended, read_BNX), pairs.key_BGND, pairs.value_BGND

    def _into(
        self, hidden_BNH: Tensor, embeds_BNH: Tensor, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Projected]:
        """What `enter` gives, and attention's queries, keys and values of it."""
        residual_BNH, read_BNX = self.enter(hidden_BNH, embeds_BNH)
        return residual_BNH, read_BNX, self.attention.project(read_BNX, turn)

    def _out_of(self, residual_BNH: Tensor, attended_BQND: Tensor, read_BNX: Tensor) -> Tensor:
        """The output, [B, N, H], of what attention found."""
        return self.finish(residual_BNH, self.attention.joined(attended_BQND, read_BNX))


@dataclass(frozen=True)
class EagleShape(LayerShape):
    """Sizes of EAGLE-1's network."""

    draft_vocabulary: int | None = None
    """Tokens that can be drafted; None: all of the target's."""
    fc_bias: bool = False
    """Whether what makes one of a pair adds a bias, as in most published drafters."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no network can have."""
        super().__post_init__()
        check_size(self.draft_vocabulary)
        if type(self.fc_bias) is not bool:
            raise ValueError(f"fc_bias is {self.fc_bias!r:.20}; expected true or false")


class EagleLayer(nn.Module):
    """A Llama layer without the norm before attention, as EAGLE-1's first layer is."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape)


class EagleNet(PairNet):
    """EAGLE-1 and EAGLE-2 (Li et al. 2024, 2401.15077 section 4.1): the next feature of the target.

    The pair at t is (f_t, embedding of x_{t+1}), f being what the target's output projection
    reads; the output is the guess of f_{t+1}, and through that projection the distribution of x_{t+2}.
    """

    family = "eagle"

    def __init__(self, config: EagleShape, ids: Sequence[int] | None = None) -> None:
        """`ids`: of the draft vocabulary, ascending; None: it has none, or weights hold them."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden, config.hidden, bias=config.fc_bias)
        self._fc = SharedInputLinears(self, "fc")
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.rotary = Rotary(config)
        hold(self, config.draft_vocabulary, ids)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """A network of a drafter folder's sizes, without its weights."""
        return cls(EagleShape.from_settings(settings))

    @classmethod
    def for_target(cls, target: nn.Module, *, ids: Sequence[int] | None = None) -> Self:
        """An untrained network of the sizes of a causal LM of `transformers`, fp32; `ids`: it drafts these alone."""
        model: Any = target
        return cls(EagleShape.of(model.config, draft_vocabulary=count_of(ids)), ids)

    @property
    def layer(self) -> EagleLayer:
        """The only one; it is in a list because serving engines call it `layers.0`."""
        (layer,) = self.layers
        assert isinstance(layer, EagleLayer)
        return layer

    @property
    def attention(self) -> Attention:
        """The layer's attention."""
        return self.layer.self_attn

    def fuse(self, features_BNF: Tensor) -> Tensor:
        """The features as they are."""
        return features_BNF

    def enter(self, hidden_BNH: Tensor, embeds_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """Both are the pair, projected; serving engines expect the embedding first."""
        pair_BNX = torch.cat((embeds_BNH, hidden_BNH), -1).to(self.fc.weight.dtype)
        (pair_BNH,) = self._fc(pair_BNX)
        return pair_BNH, pair_BNH

    def finish(self, residual_BNH: Tensor, attended_BNH: Tensor) -> Tensor:
        """Residuals and feed-forward part, [B, N, H]."""
        hidden_BNH = residual_BNH + attended_BNH
        return hidden_BNH + self.layer.mlp(self.layer.post_attention_layernorm(hidden_BNH))
