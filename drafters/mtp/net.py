"""The network of an MTP module: one decoder layer over the target's last state and the next token's embedding.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) trains such modules with the model; FastMTP (2509.18362) and Qwen3.5
apply one of them again and again. h' = norm(layer(W [norm_e(embedding of x_{t+1}); norm_h(h_t)])), and the target's
own projection makes logits of x_{t+2} of it. It is EAGLE-1's pair with norms on both halves and a whole decoder
layer, and is unrolled and decoded as EAGLE is. Read next: `layers.py`, the layer; `../eagle/net.py`, the passes;
`family.py`, which decodes; `trainers/block/mtp.py`, which trains.

Shapes: B rows, N pairs (a hidden state and the embedding of the token after it), H hidden size, X width of what
attention reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...decoding.backbone.hidden_states import LAST, UNNORMED
from ...decoding.backbone.stacked import SharedInputLinears
from ..eagle.net import PairNet
from ..layers.draft_vocabulary import count_of, hold
from ..layers.llama import Norm
from .layers import MtpAttention, MtpLayer, MtpShape, rotary_of


class MtpNet(PairNet):
    """One MTP module, applied to its own states for every further token."""

    family = "mtp"

    def __init__(self, config: MtpShape, ids: Sequence[int] | None = None) -> None:
        """`ids`: of the draft vocabulary, as of `EagleNet`."""
        super().__init__()
        self.config = config
        self.pre_fc_norm_embedding = Norm(config.hidden, config.eps)
        self.pre_fc_norm_hidden = Norm(config.hidden, config.eps)
        self.fc = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self._fc = SharedInputLinears(self, "fc")
        self.layers = nn.ModuleList([MtpLayer(config)])
        self.norm = Norm(config.hidden, config.eps)
        self.rotary = rotary_of(config)
        hold(self, config.draft_vocabulary, ids)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """A network of a drafter folder's sizes, without its weights."""
        return cls(MtpShape.from_settings(settings))

    @classmethod
    def for_target(cls, target: nn.Module, *, state: str = "behind", ids: Sequence[int] | None = None) -> Self:
        """An untrained network of the sizes of a causal LM of `transformers`, fp32; `ids`: it drafts these alone."""
        model: Any = target
        return cls(MtpShape.of(model.config, state=state, draft_vocabulary=count_of(ids)), ids)

    @property
    def reads(self) -> int:
        """The hidden state of the target that a pair holds (`Backbone.see`)."""
        return UNNORMED if self.config.state == "before" else LAST

    @property
    def layer(self) -> MtpLayer:
        """The only one; it is in a list because checkpoints call it `layers.0`."""
        (layer,) = self.layers
        assert isinstance(layer, MtpLayer)
        return layer

    @property
    def attention(self) -> MtpAttention:
        """The layer's attention."""
        return self.layer.self_attn

    def shown(self, embeds_BNH: Tensor, positions_BN: Tensor) -> Tensor:
        """As of `PairNet`: none at position 0 where the module was trained so. Later passes read none of it anyway."""
        if not self.config.blank_first:
            return embeds_BNH
        return embeds_BNH.masked_fill((positions_BN == 0)[..., None], 0.0)

    def fuse(self, features_BNF: Tensor) -> Tensor:
        """The states as they are."""
        return features_BNF.to(self.fc.weight.dtype)

    def enter(self, hidden_BNH: Tensor, embeds_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """The pair, each half normed, projected; and that behind the layer's first norm."""
        token_BNH = self.pre_fc_norm_embedding(embeds_BNH.to(hidden_BNH.dtype))
        pair_BNX = torch.cat((token_BNH, self.pre_fc_norm_hidden(hidden_BNH)), -1)
        (pair_BNH,) = self._fc(pair_BNX)
        return pair_BNH, self.layer.input_layernorm(pair_BNH)

    def finish(self, residual_BNH: Tensor, attended_BNH: Tensor) -> Tensor:
        """Residuals and feed-forward part, [B, N, H]: what is fed back, before or behind the norm."""
        hidden_BNH = residual_BNH + attended_BNH
        hidden_BNH = hidden_BNH + self.layer.mlp(self.layer.post_attention_layernorm(hidden_BNH))
        return hidden_BNH if self.config.state == "before" else self.norm(hidden_BNH)

    def head_input(self, hidden_BNH: Tensor) -> Tensor:
        """What the target's projection reads of an output, [B, N, H]: behind the norm, once."""
        normed: Tensor = self.norm(hidden_BNH) if self.config.state == "before" else hidden_BNH
        return normed
