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
_FEW = 16
"""Tokens of a call, a verify call's at most, up to which the past is what takes the time."""


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
    if goes_by_groups(query_BQND, mask):
        out_BQND = attend_by_groups(query_BQND, key_BGTD, value_BGTD, mask, scale=scaling)
    else:
        out_BQND = F.scaled_dot_product_attention(
            query_BQND, key_BGTD, value_BGTD, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
    return out_BQND.transpose(1, 2).contiguous(), None


def goes_by_groups(query_BQND: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend_by_groups` is the faster one on a CPU: for few tokens in half precision.

    There torch reads the past again for every query head, and for one token alone by a kernel that is four times as
    slow as for two. Several tokens without a mask are a prompt, which is causal.
    """
    N = query_BQND.shape[2]
    few = query_BQND.device.type == "cpu" and (N == 1 or (mask is not None and N <= _FEW))
    decodes = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return few and decodes and query_BQND.dtype in (torch.bfloat16, torch.float16)


def attend_by_groups(
    query_BQND: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, mask: Tensor | None, *, scale: float | None
) -> Tensor:
    """Attention [B, Q, N, D] with the query heads that share a key-value head as further tokens.

    Args:
        mask: [B or 1, 1, N or 1, T], as SDPA takes it; None where all tokens see all slots.
    """
    B, Q, N, D = query_BQND.shape
    G = key_BGTD.shape[1]
    wide_BGMD = query_BQND.reshape(B, G, Q // G * N, D)
    if wide_BGMD.shape[2] == 1:  # twice the same is faster than once
        return attend_by_groups(query_BQND.expand(-1, -1, 2, -1), key_BGTD, value_BGTD, mask, scale=scale)[:, :, :1]
    if mask is not None:
        mask = mask.expand(*mask.shape[:2], N, -1)
        mask = mask[:, :, None].expand(-1, -1, Q // G, -1, -1).flatten(2, 3)
    out_BGMD = F.scaled_dot_product_attention(wide_BGMD, key_BGTD, value_BGTD, attn_mask=mask, scale=scale)
    return out_BGMD.reshape(B, Q, N, D)


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
