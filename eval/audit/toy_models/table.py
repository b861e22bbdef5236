"""A language model that is a table, with hidden states that a drafter can read.

The distribution behind a token is a row of the table, so that whole sequences can be counted
against their exact distribution (`audit/enumeration.py`). Hidden states and projection are made so that their
product is that row: what rides on a target rides on a table as it is. Read next: `nets.py`, `trees.py`.

Shapes: B rows, N nodes, V vocabulary, H hidden size, S tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ....decoding.backbone.backbone import Backbone, Seen
from ....decoding.backbone.kv_cache import KVCache
from ....decoding.tree.tree import AnyTree
from ....drafters.projection import PLAIN, Shaping

HIDDEN = 8


class TableWeights(nn.Module):
    """Embedding and output projection, as a causal LM hands them out."""

    def __init__(self, logits_VV: Tensor, shaping: Shaping) -> None:
        super().__init__()
        # under the names that Cohere and Gemma 2 have for them
        named: dict[str, Any] = {"logit_scale": shaping.scale, "final_logit_softcapping": shaping.cap}
        self.config = PretrainedConfig(**named)
        V, device = len(logits_VV), logits_VV.device
        g = torch.Generator().manual_seed(V)
        # rows of length 1, each at a right angle to the others: the projection takes them apart again
        states_VH = torch.linalg.qr(torch.randn(HIDDEN, V, generator=g)).Q.T.to(device)
        self.embedding = nn.Embedding.from_pretrained(torch.randn(V, HIDDEN, generator=g).to(device))
        self.projection = nn.Linear(HIDDEN, V, bias=False, device=device)
        self.projection.weight = nn.Parameter(_behind(logits_VV, shaping).T @ states_VH, requires_grad=False)
        self.register_buffer("states_VH", states_VH)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, which has nothing to do with the hidden states."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """The projection: of the last hidden state behind token v it makes row v of the table."""
        return self.projection


def _behind(logits_VV: Tensor, shaping: Shaping) -> Tensor:
    """What `shaping` makes these logits of."""
    cap = shaping.cap
    scaled_VV = logits_VV if cap is None else cap * torch.atanh(logits_VV / cap)
    return scaled_VV / shaping.scale


class TableModel:
    """A language model whose next token depends on the last one alone. Stands for a `Backbone`."""

    name, context, is_recurrent = "table", 2**31, False

    def __init__(self, logits_VV: Tensor, shaping: Shaping = PLAIN) -> None:
        """Row v: logits of the token behind v, as `shaping` leaves them; below its cap."""
        self.logits_VV = logits_VV
        self.vocabulary, self.device = len(logits_VV), logits_VV.device
        self.model = TableWeights(logits_VV, shaping)

    def project(self, hidden: Tensor) -> Tensor:
        """The product [..., V] of last hidden states and the output projection."""
        product: Tensor = self.model.projection(hidden)
        return product

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        _kv_cache: KVCache,
        *,
        layers: Sequence[int] = (),
        features: list[Tensor] | None = None,
    ) -> Tensor:
        """Logits behind the last token of every prompt, [B, V]; states of every prompt in `features`."""
        if features is not None and layers:
            known: dict[tuple[int, ...], Tensor] = {}  # many rows have the same prompt
            for prompt in prompts:
                key = tuple(prompt)
                if key not in known:
                    known[key] = self.states(torch.tensor(key, device=self.device), layers)
                features.append(known[key])
        return self.logits_VV[torch.tensor([prompt[-1] for prompt in prompts], device=self.device)]

    def states(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        """Hidden states [..., F] at some tokens: the last is what the projection reads, others are its turns."""
        states_VH = cast(Tensor, self.model.states_VH)
        return torch.cat([states_VH.roll(layer + 1, 1)[tokens] for layer in layers], -1)

    def forward(
        self, tokens_BN: Tensor, _lengths_B: Tensor, _tree: AnyTree, _kv_cache: KVCache, *, keep: int = 0
    ) -> Tensor:
        """Logits [B, N, V] of every node."""
        logits_BNV = self.logits_VV[tokens_BN]
        return logits_BNV[:, -keep:] if keep else logits_BNV

    def see(
        self,
        tokens_BN: Tensor,
        lengths_B: Tensor,
        tree: AnyTree,
        kv_cache: KVCache,
        *,
        layers: Sequence[int] = (),
        **_how: Any,
    ) -> Seen:
        """`forward`, and the hidden states of `layers`."""
        logits_BNV = self.forward(tokens_BN, lengths_B, tree, kv_cache)
        return Seen(logits_BNV, self.states(tokens_BN, layers) if layers else None)

    def check_alike(self, _written: Sequence[Sequence[int]]) -> None:
        """A table lies in one process, and has none to agree with."""

    def as_backbone(self) -> Backbone:
        """What the engine and the drafters take it for."""
        return cast(Backbone, self)


def tables(
    seed: int, drafts: int = 2, *, vocabulary: int = 3, device: torch.device | str = "cpu"
) -> tuple[TableModel, list[TableModel]]:
    """A target, and drafts that resemble it."""
    g = torch.Generator().manual_seed(seed)
    shape = (vocabulary, vocabulary)
    target_VV = 0.8 * torch.randn(shape, generator=g)
    others = [target_VV + 0.8 * torch.randn(shape, generator=g) for _ in range(drafts)]
    return TableModel(target_VV.to(device)), [TableModel(logits_VV.to(device)) for logits_VV in others]
