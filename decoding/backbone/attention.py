"""Attention under a tree mask without copying the key-value heads that query heads share.

With a mask, `transformers` repeats each key-value head for its group of query heads before
attention; on a CPU that copy of the whole past slows every verify call down. On a GPU the masked
kernels want the copy, so there the stock function runs. Families whose scores SDPA cannot compute,
with soft caps (Gemma2) or sinks (gpt-oss), keep their own function. Read next: `backbone.py`.

Shapes: B rows, Q query heads, G key-value heads, N new tokens, T slots in view, D head size.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

NAME = "draftsmith_sdpa"
OWN = "draftsmith_eager"
TREE_MASKED = ("sdpa", NAME, OWN)
"""Implementations that read a boolean mask; `eager` would add it to the scores as 0 and 1."""


def grouped_attention(
    module: nn.Module,
    query_BQND: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention with the signature that `transformers` calls. [B, N, Q, D]."""
    # some families name the mask when they call, so its name is theirs
    mask = attention_mask
    beyond = any(more.get(name) is not None for name in ("softcap", "position_bias"))
    if mask is None or query_BQND.device.type != "cpu" or beyond:
        return sdpa_attention_forward(
            module, query_BQND, key_BGTD, value_BGTD, mask, dropout=dropout, scaling=scaling, **more
        )
    out_BQND = F.scaled_dot_product_attention(
        query_BQND, key_BGTD, value_BGTD, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out_BQND.transpose(1, 2).contiguous(), None


def own_attention(
    module: nn.Module,
    query_BQND: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """The eager function of the model's own file, given a mask that it can add. [B, N, Q, D]."""
    mask = attention_mask
    if mask is not None and mask.dtype == torch.bool:
        least = torch.finfo(query_BQND.dtype).min
        mask = torch.zeros_like(mask, dtype=query_BQND.dtype).masked_fill(~mask, least)
    own = sys.modules[type(module).__module__].eager_attention_forward
    return own(module, query_BQND, key_BGTD, value_BGTD, mask, **more)


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let a loaded model decode under tree masks: grouped, or by its own function without SDPA."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
    else:
        use_own_attention(model)


def use_own_attention(model: PreTrainedModel) -> None:
    """Let a model that SDPA cannot compute read boolean masks, which training uses too; others stay as they are."""
    only_own = model._supports_attention_backend and not model._supports_sdpa
    # an implementation that was chosen explicitly (eager despite SDPA, flash) is kept
    if model.config._attn_implementation == "eager" and only_own:
        model.set_attn_implementation(OWN)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
AttentionInterface.register(OWN, own_attention)
AttentionMaskInterface.register(OWN, eager_mask)
