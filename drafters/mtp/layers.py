"""The decoder layer of an MTP module: attention with norms of query and key, and what checkpoints add to it.

A fresh module has Llama's layer with a norm on every query and key head, as Qwen3's layers have. A module that a
target brings may also have biases (MiMo), a gate on what attention puts out and heads that are turned in part
(Qwen3.5). Read next: `net.py`, the network; `own.py`, which reads a target's own.

Shapes: B rows, N pairs, H hidden size, X width of what attention reads, Q query heads, G key-value heads, D head
size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...decoding.backbone.hidden_states import UNNORMED
from ..layers.draft_vocabulary import check_size
from ..layers.llama import Attention, FeedForward, LayerShape, Norm, Projected, Rotary, sizes_like, turned
from ..sizes import check_sizes

STATES = ("behind", "before")
"""Whether states are read, and fed back, before or behind the last norm."""


@dataclass(frozen=True)
class MtpShape(LayerShape):
    """Sizes of a module, and which parts its layer has."""

    rotary: int
    """Numbers of a head that are turned to its position, the first ones."""
    state: str = "behind"
    """`behind` the last norm, of the target and of the module, or `before` it."""
    query_norm: bool = True
    """A norm on every query and key head."""
    gated: bool = False
    """A gate on what attention puts out."""
    bias: bool = False
    """Biases of queries, keys and values."""
    blank_first: bool = False
    """Whether the pair at position 0 has zeros in place of its token's embedding."""
    draft_vocabulary: int | None = None
    """Tokens that can be drafted; None: all of the target's."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no layer can have."""
        super().__post_init__()
        check_sizes(rotary=self.rotary)
        check_size(self.draft_vocabulary)
        if self.rotary > self.head_size or self.rotary % 2:
            raise ValueError(f"rotary is {self.rotary}; expected an even number up to head_size, {self.head_size}")
        flags = {name: getattr(self, name) for name in ("query_norm", "gated", "bias", "blank_first")}
        odd = next((name for name, flag in flags.items() if type(flag) is not bool), None)
        if odd is not None or self.state not in STATES:
            what = f"state is {self.state!r:.40}" if odd is None else f"{odd} is {flags[odd]!r:.40}"
            raise ValueError(f"{what}; expected of state {' or '.join(STATES)}, of the others true or false")

    @property
    def _turned(self) -> int:
        return self.rotary

    @classmethod
    def of(cls, config: Any, **chosen: Any) -> Self:
        """As of `LayerShape`; by default every number of a head is turned."""
        return super().of(config, **{"rotary": sizes_like(config)["head_size"]} | chosen)

    @property
    def layers(self) -> tuple[int, ...]:
        """Hidden states that it reads and the target's projection does not (`Backbone.see`)."""
        return (UNNORMED,) if self.state == "before" else ()


class MtpAttention(Attention):
    """Attention of an MTP module's layer."""

    def __init__(self, shape: MtpShape) -> None:
        super().__init__(shape, shape.hidden, query_norm=shape.query_norm)
        self._rotary = shape.rotary
        if shape.bias:
            for name in ("q_proj", "k_proj", "v_proj"):
                plain: nn.Linear = getattr(self, name)
                setattr(self, name, nn.Linear(plain.in_features, plain.out_features))
        width = shape.heads * shape.head_size
        self.gate_proj = nn.Linear(shape.hidden, width, bias=False) if shape.gated else None

    def project(self, x_BNX: Tensor, turn: tuple[Tensor, Tensor]) -> Projected:
        """As of `Attention`, of a part of each head turned."""
        return self._by_heads(x_BNX, turn)

    def _turned(self, x_BGND: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        if self._rotary == self.head_size:
            return turned(x_BGND, turn)
        return torch.cat((turned(x_BGND[..., : self._rotary], turn), x_BGND[..., self._rotary :]), -1)

    def joined(self, out_BQND: Tensor, read_BNX: Tensor | None = None) -> Tensor:
        """As of `Attention`; where there is a gate, it is made of `read_BNX`."""
        out_BNX = out_BQND.transpose(1, 2).flatten(2)
        if self.gate_proj is not None:
            if read_BNX is None:
                raise ValueError("gated attention needs what it has read")
            out_BNX = out_BNX * torch.sigmoid(self.gate_proj(read_BNX))
        (out_BNH,) = self._out(out_BNX)
        return out_BNH


class MtpLayer(nn.Module):
    """A decoder layer: norm, attention, norm, feed-forward part."""

    def __init__(self, shape: MtpShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = MtpAttention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape)


def rotary_of(shape: MtpShape) -> Rotary:
    """The angles of the numbers that are turned."""
    return Rotary(replace(shape, head_size=shape.rotary))
