"""Attention under a tree mask without copying the key-value heads that query heads share.

With a mask, `transformers` repeats each key-value head for its group of query heads before
attention; on a CPU that copy of the whole past slows every verify call down. On a GPU the masked
kernels want the copy, so there the stock function runs. Read next: `backbone.py`.

Shapes: B rows, Q query heads, G key-value heads, N new tokens, T slots in view, D head size.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "draftsmith_sdpa"


def grouped_attention(
    module: nn.Module, query_BQND: Tensor, key_BGTD: Tensor, value_BGTD: Tensor,
    mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Scaled dot-product attention with the signature that `transformers` calls. [B, N, Q, D]."""
    if mask is None or query_BQND.device.type != "cpu":
        return sdpa_attention_forward(
            module, query_BQND, key_BGTD, value_BGTD, mask, dropout=dropout, scaling=scaling, **more
        )
    out_BQND = F.scaled_dot_product_attention(
        query_BQND, key_BGTD, value_BGTD, attn_mask=mask, dropout_p=dropout, scale=scaling,
        enable_gqa=True,
    )  # fmt: skip
    return out_BQND.transpose(1, 2).contiguous(), None


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let a loaded model decode with `grouped_attention`, if it used the stock SDPA function."""
    # others (eager with soft caps or sinks, flash) compute something else, and stay as they are
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
