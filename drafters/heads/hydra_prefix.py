"""The layer before Hydra++'s heads: it reads the whole text, while the target's last state
was trained to predict one token.

Ankner et al. 2024, arXiv 2402.05109, section 4 ("prefix attention"). One decoder layer over the
target's last hidden states, causal, with keys and values of its own; it runs once per target call.
What is trained is what decodes: training passes the documents of whole rows, decoding a KV cache.
Read next: `hydra.py`, the heads and the decoding; `../layers/llama.py`, the parts.

Shapes: B rows, N positions, H hidden size, T keys in view.
"""

from __future__ import annotations

from torch import Tensor, nn

from ...decoding.backbone.kv_cache import KVCache
from ..eagle.net import EagleLayer
from ..layers.llama import LayerShape, Norm, Rotary
from ..layers.passes import Passes


class PrefixLayer(EagleLayer):
    """A Llama layer of the target's sizes, without biases; it passes h on until it is trained.

    The published code has one more norm after the layer, which heads that begin as copies of the
    target's projection would have to unlearn.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.rotary = Rotary(shape)
        for last in (self.self_attn.o_proj, self.mlp.down_proj):
            nn.init.zeros_(last.weight)

    def forward(
        self,
        hidden_BNH: Tensor,
        positions_BN: Tensor,
        mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        *,
        documents_BN: Tensor | None = None,
    ) -> Tensor:
        """What the heads read in place of the target's states, [B, N, H].

        Args:
            hidden_BNH: the target's last hidden states, in the precision of the weights.
            positions_BN: counted from the first token of the document.
            mask: bool, broadcastable to [B, 1, N, T]; None is causal.
            kv_cache: where keys and values are kept, aimed by the caller; None in training.
            documents_BN: in training, in place of a mask: the document of every position, which
                sees no other; memory then grows with N alone.
        """
        attention, turn = self.self_attn, self.rotary(positions_BN)
        read_BNH = self.input_layernorm(hidden_BNH)
        if documents_BN is None:
            hidden_BNH = hidden_BNH + attention(read_BNH, turn, mask, kv_cache)
        else:
            seen = Passes(documents_BN, attention.group).first(attention.project(read_BNH, turn))
            hidden_BNH = hidden_BNH + attention.joined(seen)
        return hidden_BNH + self.mlp(self.post_attention_layernorm(hidden_BNH))
