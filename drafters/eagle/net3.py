"""EAGLE-3's network: fused hidden states in, its own output in again, a head of its own.

Li et al. 2025 (arXiv 2503.01840). The pair at t is (what the drafter knows of t, the embedding of
x_{t+1}). After verified tokens that is the target's low, middle and high states, fused; after
guessed ones it is the drafter's own output, so training feeds outputs back as well ("training-time
test", `PairNet.unroll`). EAGLE-3.1 is `feature_norms`: the fused states come in equally loud, and
outputs that are fed back do not grow from pass to pass. Read next: `trainers/eagle3.py`, which
trains it; `eagle/proposer.py`, which decodes.

Shapes: B rows, N pairs, H hidden size, F numbers of the fused states, X width of what attention
reads, U tokens of the draft vocabulary, V of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ...decoding.backbone.stacked import SharedInputLinears, through
from ...errors import RequestError
from ..layers.draft_vocabulary import hold, ids_of, rows_at
from ..layers.llama import Attention, FeedForward, LayerShape, Norm, Rotary
from ..projection import scaled_weight
from ..sizes import check_layers, check_parts, check_sizes
from .net import PairNet


@dataclass(frozen=True)
class Eagle3Shape(LayerShape):
    """Sizes of a network with a vocabulary of its own."""

    layers: tuple[int, ...]
    """Hidden states of the target that are fused, low to high (`Backbone.see`)."""
    vocabulary: int
    """Rows of the target's output projection."""
    draft_vocabulary: int
    """Tokens that can be drafted."""
    feature_norms: bool = False
    """EAGLE-3.1: each fused state has a norm of its own, and the output comes out of the last."""
    output_norm: bool | None = field(default=None, kw_only=True)
    """Whether what is fed back comes out of the last norm; None: as `feature_norms`, with which it belongs."""
    own_embedding: bool = field(default=False, kw_only=True)
    """Whether tokens are embedded by a table of the network's own, as others train some; it is not trained here."""
    norm_before_residual: bool = field(default=False, kw_only=True)
    """Whether the layer adds to the hidden state behind its norm, as some published drafters do."""
    norm_before_fc: bool = field(default=False, kw_only=True)
    """Whether the fused states have one norm together, as some published drafters do."""
    head_norms: bool = field(default=False, kw_only=True)
    """Whether attention has a norm on every query and key head, as layers of Qwen3 have."""
    target_hidden: int | None = field(default=None, kw_only=True)
    """Hidden size of the target where the network is narrower; it then has an embedding of its own."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no network can have."""
        super().__post_init__()
        check_sizes(vocabulary=self.vocabulary, draft_vocabulary=self.draft_vocabulary)
        check_parts(len(self.layers), f"{len(self.layers)} fused states")
        check_layers(self.layers)
        of_states = (self.feature_norms, self.norm_before_residual, self.feeds_back_normed, self.norm_before_fc)
        flags = (*of_states, self.own_embedding, self.head_norms)
        if self.draft_vocabulary > self.vocabulary or any(type(flag) is not bool for flag in flags):
            raise ValueError(
                f"draft_vocabulary {self.draft_vocabulary} of vocabulary {self.vocabulary}, feature_norms, "
                f"norm_before_residual, output_norm, norm_before_fc, own_embedding and head_norms {flags!r:.60}; "
                "expected at most as many tokens, and true or false"
            )
        if self.target_hidden is not None:
            check_sizes(target_hidden=self.target_hidden)
            if not self.own_embedding:
                raise ValueError(
                    f"target_hidden is {self.target_hidden} and own_embedding false; expected an embedding of its own "
                    "where the target's is of another size"
                )

    @property
    def feeds_back_normed(self) -> bool:
        """Whether an output is behind the last norm already."""
        return self.feature_norms if self.output_norm is None else self.output_norm

    @property
    def fused(self) -> int:
        """Numbers of the fused states, F."""
        return len(self.layers) * (self.target_hidden or self.hidden)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """The sizes that a drafter folder's `config.json` holds."""
        return cls(**(settings | {"layers": tuple(settings["layers"])}))  # JSON knows lists alone


def fused_layers(count: int) -> tuple[int, int, int]:
    """The hidden states that EAGLE-3 fuses, for a target of `count` layers.

    2, half and the third last from seven layers on: the default of every serving engine. Below that
    these are not three different ones.

    Raises:
        RequestError: the target has no three states.
    """
    if count < 2:
        raise RequestError(
            f"a target of {count} layer has {count + 1} hidden states, and EAGLE-3 fuses three "
            "different ones; train method eagle, or take a target of 2 layers or more"
        )
    if count == 2:  # the last is after the norm, which no engine hands out
        return 0, 1, 2
    return (2, count // 2, count - 3) if count >= 7 else (count // 4, count // 2, count - 1)


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads [norm(embedding), norm(hidden)], twice as wide."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape, 2 * shape.hidden, query_norm=shape.head_norms)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape)


class Eagle3Net(PairNet):
    """The drafter of EAGLE-3; `head` makes logits over the draft vocabulary of its output."""

    family = "eagle3"
    Shape: ClassVar[type[Eagle3Shape]] = Eagle3Shape
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Shape, ids: Sequence[int] | None = None) -> None:
        """`ids`: target ids of the draft vocabulary, ascending; None where weights are loaded, which hold them."""
        super().__init__()
        self.config = config
        H, U = config.hidden, config.draft_vocabulary
        self.fc = nn.Linear(config.fused, H, bias=False)
        self._fc = SharedInputLinears(self, "fc")
        if config.norm_before_fc:
            self.input_norm = Norm(config.fused, config.eps)
        if config.feature_norms:
            self.fc_norm = nn.ModuleList(Norm(config.target_hidden or H, config.eps) for _ in config.layers)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocabulary, H)
        self.midlayer = Eagle3Layer(config)
        self.norm = Norm(H, config.eps)
        self.lm_head = nn.Linear(H, U, bias=False)
        self.rotary = Rotary(config)
        hold(self, U, ids)
        known_V = torch.zeros(config.vocabulary, dtype=torch.bool)
        self.register_buffer("t2d", known_V.index_fill(0, self.ids_U, True))

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """A network of a drafter folder's sizes, without its weights and its draft vocabulary."""
        return cls(cls.Shape.from_settings(settings))

    @classmethod
    def for_target(cls, target: nn.Module, *, ids: Sequence[int], **chosen: Any) -> Self:
        """An untrained network for a causal LM of `transformers`, fp32.

        Its head begins as the target's rows of the draft vocabulary.

        Args:
            ids: target ids of the draft vocabulary, ascending.
            chosen: the fields of `Shape` beside those of `LayerShape` and the vocabularies.
        """
        model: Any = target
        weight_VH = scaled_weight(model)
        sizes = {"vocabulary": len(weight_VH), "draft_vocabulary": len(ids)}
        made = cls(cls.Shape.of(model.config, **sizes, **chosen), ids)
        with torch.no_grad():
            made.lm_head.weight.copy_(rows_at(weight_VH, ids))
        return made

    @property
    def ids_U(self) -> Tensor:
        """Target ids of the draft vocabulary."""
        ids_U = ids_of(self)
        assert ids_U is not None  # made with some
        return ids_U

    @property
    def attention(self) -> Attention:
        """The layer's attention."""
        return self.midlayer.self_attn

    def fuse(self, features_BNF: Tensor) -> Tensor:
        """The target's states side by side as one hidden state [B, N, H]."""
        features_BNF = features_BNF.to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            features_BNF = self.input_norm(features_BNF)
        if self.config.feature_norms:
            states = features_BNF.chunk(len(self.config.layers), -1)
            normed = [norm(x) for norm, x in zip(self.fc_norm, states, strict=True)]
            features_BNF = torch.cat(normed, -1)
        (fused_BNH,) = self._fc(features_BNF)
        return fused_BNH

    def enter(self, hidden_BNH: Tensor, embeds_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to, by default the hidden state as it is; and embedding and hidden state, both normed."""
        layer = self.midlayer
        embeds_BNH = layer.input_layernorm(embeds_BNH.to(hidden_BNH.dtype))
        normed_BNH = layer.hidden_norm(hidden_BNH)
        residual_BNH = normed_BNH if self.config.norm_before_residual else hidden_BNH
        return residual_BNH, torch.cat((embeds_BNH, normed_BNH), -1)

    def finish(self, residual_BNH: Tensor, attended_BNH: Tensor) -> Tensor:
        """Residuals and feed-forward part, [B, N, H]; of EAGLE-3.1 after the last norm."""
        hidden_BNH = residual_BNH + attended_BNH
        layer = self.midlayer
        hidden_BNH = hidden_BNH + layer.mlp(layer.post_attention_layernorm(hidden_BNH))
        return self.norm(hidden_BNH) if self.config.feeds_back_normed else hidden_BNH

    def head_input(self, hidden_BNH: Tensor) -> Tensor:
        """What the head reads of an output, [B, N, H]: after the last norm, once."""
        return hidden_BNH if self.config.feeds_back_normed else self.norm(hidden_BNH)

    def head(self, hidden_BNH: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [B, N, U]."""
        return through(self.lm_head, self.head_input(hidden_BNH))
