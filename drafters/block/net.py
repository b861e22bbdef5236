"""A block drafter's network: the target's states as keys and values of every layer, one block of slots.

DFlash (Chen et al. 2026). The state of a known token is fused once, and every layer makes keys and
values of it by its own projections; it has no query, and no layer changes it. A block begins at the
anchor a, whose token x_a is known while its state is not: slot 0 holds the embedding of x_a, the
others one vector, the mask. All slots are read in one pass, and the target's own projection turns
them into distributions: of x_{a+1}, x_{a+2}, ..., drafted without seeing each other.

Two layouts: `fill-in` (DFlash), in which slot k speaks of its own token x_{a+k} and slot 0 of none;
`anchor-first`, in which slot k speaks of the token behind it, x_{a+1+k}. Read next: `attention.py`, what a
slot sees; `proposer.py`, which decodes; `trainers/block/dflash.py`, which trains.

Shapes: R rows, S tokens of a row, A anchors of a row, B slots of a block, N slots of a forward pass,
K drafted tokens, H hidden size, F numbers of the fused states, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn

from ...decoding.backbone.kv_cache import KVCache
from ...decoding.backbone.windows import Window
from ..layers.draft_vocabulary import check_size, count_of, hold
from ..layers.llama import FeedForward, LayerShape, Norm, Projected, Rotary, embedding_spread, turned
from ..layers.sinks import Keys
from ..layers.static import again
from ..sizes import check_layers, check_parts, check_sizes
from .attention import Packed, SlotView, View

Layout = Literal["fill-in", "anchor-first"]


@dataclass(frozen=True)
class BlockShape(LayerShape):
    """Sizes of a network: what `config.json` of a drafter folder holds as its settings."""

    layers: tuple[int, ...]
    """Hidden states of the target that are fused, low to high (`Backbone.see`)."""
    decoder_layers: int
    """Layers of the network."""
    size: int
    """Slots of a block, the anchor's included."""
    layout: Layout
    causal: bool
    """Whether a slot sees the earlier ones alone."""
    mask_token: int | None = None
    """The unused id whose embedding is the mask; None: the network has a mask of its own."""
    draft_vocabulary: int | None = field(default=None, kw_only=True)
    """Tokens that can be drafted; None: all of the target's."""
    windows: tuple[int | None, ...] = field(default=(), kw_only=True)
    """Of every layer how many positions up to its own a slot sees, as others train some; None: all. Empty: of all."""
    causal_windows: bool = field(default=False, kw_only=True)
    """Whether a slot of a layer with a window sees the earlier ones of its block alone, whatever `causal` says."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no network can have."""
        super().__post_init__()
        check_sizes(decoder_layers=self.decoder_layers, size=self.size)
        check_parts(len(self.layers) + self.decoder_layers, f"{len(self.layers)} states and layers")
        check_parts(self.size, "slots")
        check_layers(self.layers, ordered=True)
        check_size(self.draft_vocabulary, getattr(self, "vocabulary", None))
        if self.layout not in get_args(Layout) or type(self.causal) is not bool or self.most < 1:
            raise ValueError(
                f"layout {self.layout!r:.20}, causal {self.causal!r:.20}, size {self.size}; expected "
                f"{' or '.join(get_args(Layout))}, true or false, and a slot that speaks of a token"
            )
        if self.mask_token is not None and (type(self.mask_token) is not int or self.mask_token < 0):
            raise ValueError(f"mask_token is {self.mask_token!r:.20}; expected the id of a token, or null")
        sizes = [each for each in self.windows if each is not None]
        if (self.windows and len(self.windows) != self.decoder_layers) or type(self.causal_windows) is not bool:
            raise ValueError(
                f"windows {list(self.windows)!r:.40} and causal_windows {self.causal_windows!r:.20} of "
                f"{self.decoder_layers} layers; expected a number or null for each, and true or false"
            )
        if any(type(each) is not int or each < self.size for each in sizes):
            raise ValueError(
                f"windows are {list(self.windows)!r:.40}; expected at least {self.size} positions, those of a block"
            )

    def view(self, layer: int) -> SlotView:
        """What a slot of a layer sees of text and block."""
        size = self.windows[layer] if self.windows else None
        causal = self.causal or (size is not None and self.causal_windows)
        return SlotView(None if size is None else Window(size), causal)

    @property
    def first(self) -> int:
        """The first slot that speaks of a token."""
        return 1 if self.layout == "fill-in" else 0

    @property
    def most(self) -> int:
        """Tokens that a block drafts, K."""
        return self.size - self.first

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """The sizes that a drafter folder's `config.json` holds."""
        # JSON knows lists alone
        return cls(**(settings | {name: tuple(settings[name]) for name in ("layers", "windows") if name in settings}))


def spread_layers(count: int) -> tuple[int, ...]:
    """The hidden states that a drafter for a target of `count` layers reads by default.

    Five, spread from the second layer's output to the last but two, as in the published drafters. Below
    eight layers these are not five different ones: the quarter, the half and the last but one then.
    """
    if count >= 8:
        return tuple(1 + round(1 + i * (count - 4) / 4) for i in range(5))
    return tuple(sorted({count // 4, count // 2, count - 1}))


class BlockAttention(nn.Module):
    """Qwen3's grouped attention: a norm on the queries and keys of each head, no biases."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.head_size, self.group = shape.head_size, shape.heads // shape.kv_heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_size, shape.eps)
        self.k_norm = Norm(shape.head_size, shape.eps)

    def context(self, x_RSH: Tensor, turn: tuple[Tensor, Tensor]) -> Keys:
        """Keys and values; `turn` is what `Rotary` gives for the positions."""
        key, value = self._heads(self.k_proj(x_RSH)), self._heads(self.v_proj(x_RSH))
        return Keys(turned(self.k_norm(key), turn), value)

    def forward(self, x_RNH: Tensor, turn: tuple[Tensor, Tensor], view: View, layer: int) -> Tensor:
        """Attention output [R, N, H] of slots."""
        query = turned(self.q_norm(self._heads(self.q_proj(x_RNH))), turn)
        out_RQND = view.attend(layer, Projected(query, *self.context(x_RNH, turn)), self.group)
        return self.o_proj(out_RQND.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class BlockLayer(nn.Module):
    """A Llama layer over slots."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, x_RNH: Tensor, turn: tuple[Tensor, Tensor], view: View, layer: int) -> Tensor:
        """The slots behind the layer, [R, N, H]."""
        x_RNH = x_RNH + self.self_attn(self.input_layernorm(x_RNH), turn, view, layer)
        return x_RNH + self.mlp(self.post_attention_layernorm(x_RNH))


class BlockNet(nn.Module):
    """The drafter of DFlash; embedding and output projection are the target's, passed in and never saved."""

    family = "dflash"
    Shape: ClassVar[type[BlockShape]] = BlockShape
    Layer: ClassVar[type[BlockLayer]] = BlockLayer

    def __init__(self, config: BlockShape, ids: Sequence[int] | None = None) -> None:
        """`ids`: of the draft vocabulary, ascending; None: it has none, or weights hold them."""
        super().__init__()
        self.config = config
        H = config.hidden
        self.fc = nn.Linear(len(config.layers) * H, H, bias=False)
        self.hidden_norm = Norm(H, config.eps)
        self.layers = nn.ModuleList(self.Layer(config) for _ in range(config.decoder_layers))
        self.norm = Norm(H, config.eps)
        # a layer of its own and no bare weight: what shards weights gathers those of layers
        self.mask_embedding = nn.Embedding(1, H)
        self.mask_embedding.requires_grad_(config.mask_token is None)
        self.rotary = Rotary(config)
        hold(self, config.draft_vocabulary, ids)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """A network of a drafter folder's sizes, without its weights."""
        return cls(cls.Shape.from_settings(settings))

    @classmethod
    def for_target(cls, target: nn.Module, *, ids: Sequence[int] | None = None, **chosen: Any) -> Self:
        """An untrained network for a causal LM of `transformers`, fp32.

        Args:
            ids: the tokens that it drafts, ascending; None: all.
            chosen: the fields of `Shape` beside those of `LayerShape`.
        """
        model: Any = target
        made = cls(cls.Shape.of(model.config, **chosen, draft_vocabulary=count_of(ids)), ids)
        embedding = model.get_input_embeddings()
        with torch.no_grad():
            if made.config.mask_token is None:
                made.mask_embedding.weight.mul_(embedding_spread(model).to(made.mask_embedding.weight.device))
            else:  # what the target's layers read of that id, which for Gemma is not the table's row
                id_1 = torch.tensor([made.config.mask_token], device=embedding.weight.device)
                made.mask_embedding.weight.copy_(embedding(id_1))
        return made

    def fuse(self, features_RSF: Tensor) -> Tensor:
        """The target's states side by side as what every layer makes keys and values of, [R, S, H]."""
        return self.hidden_norm(self.fc(features_RSF.to(self.fc.weight.dtype)))

    def contexts(self, fused_RSH: Tensor, positions_RS: Tensor) -> list[Keys]:
        """Keys and values of every layer."""
        turn = self.rotary(positions_RS)
        return [each.self_attn.context(fused_RSH, turn) for each in self._layers]

    def remember(self, fused_RSH: Tensor, positions_RS: Tensor, kv_cache: KVCache) -> None:
        """Write the keys and values of states to a KV cache, which has been aimed."""
        for number, context in enumerate(self.contexts(fused_RSH, positions_RS)):
            kv_cache.update(*context, number)

    def slots(self, roots: Tensor, count: int) -> Tensor:
        """What the first `count` slots of a block hold, [..., count, H], of the anchor's embedding [..., H]."""
        mask_H = self.mask_embedding(torch.zeros((), dtype=torch.long, device=roots.device))
        shape = (*roots.shape[:-1], count - 1, roots.shape[-1])
        return torch.cat((roots.to(mask_H.dtype)[..., None, :], mask_H.expand(shape)), -2)

    def forward(self, x_RNH: Tensor, positions_RN: Tensor, view: View, *, recompute: bool = False) -> Tensor:
        """What the target's projection reads of every slot, [R, N, H].

        Args:
            x_RNH: what the slots hold.
            positions_RN: counted from the first token of the document; the anchor's is slot 0's.
            view: what they see.
            recompute: keep of each layer what it reads alone, and compute it again for its gradient; no bit of any
                number differs.
        """
        turn = self.rotary(positions_RN)
        for number, layer in enumerate(self._layers):
            x_RNH = again(layer, recompute)(x_RNH, turn, view, number)
        return self.norm(x_RNH)

    def blocks(
        self,
        features_RSF: Tensor,
        positions_RS: Tensor,
        documents_RS: Tensor,
        roots_RAH: Tensor,
        anchor_RA: Tensor,
        *,
        masked: bool = True,
        recompute: bool = False,
    ) -> Tensor:
        """Many blocks of packed rows at once, as training needs them: [R, A, K, H].

        Draft d of a block, from 1 on, is read off [:, :, d - 1] and speaks of the token d places behind the anchor.

        Args:
            features_RSF: the target's states side by side.
            positions_RS: counted from the first token of the document.
            documents_RS: number of the document that a token belongs to.
            roots_RAH: embeddings of the anchors' tokens.
            anchor_RA: where they stand in the row.
            masked: make a mask of slots by states, which is faster where it is small.
            recompute: as of `forward`.
        """
        B, (R, A) = self.config.size, anchor_RA.shape
        contexts = self.contexts(self.fuse(features_RSF), positions_RS)
        seen = [self.config.view(layer) for layer in range(self.config.decoder_layers)]
        view = Packed(contexts, documents_RS, anchor_RA, B, seen, masked=masked)
        slot_B = torch.arange(B, device=anchor_RA.device)
        positions_RAB = positions_RS.gather(1, anchor_RA)[..., None] + slot_B
        slots_RNH = self.slots(roots_RAH, B).flatten(1, 2)
        out_RNH = self(slots_RNH, positions_RAB.flatten(1), view, recompute=recompute)
        return out_RNH.view(R, A, B, -1)[:, :, self.config.first :]

    def behind(self, _token_P: Tensor) -> tuple[Tensor, Tensor] | None:
        """What the tokens in front of drafts add to the projection's product: what is given, and its weight.

        None: nothing, slots alone speak. `dspark.py` has more.
        """
        return None

    @property
    def _layers(self) -> Sequence[Any]:
        return list(self.layers)
