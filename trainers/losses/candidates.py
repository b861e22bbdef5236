"""The likeliest tokens of a position, and what a projection says of these alone, never holding all logits at once.

A head that picks among a few tokens is trained on them: which they are takes one pass over the vocabulary without a
gradient, and their logits a few rows of the projection. Read next: `chunked.py`, losses over all tokens.

Shapes: P positions, c positions of a chunk, C candidates of a position, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...drafters.projection import Projection
from .chunked import compute_dtype


@torch.no_grad()
def likeliest(hidden_PH: Tensor, projection: Projection, count: int, chunk: int) -> Tensor:
    """The `count` tokens with the highest logits, best first. int64 [P, C]."""
    compute = compute_dtype(hidden_PH)
    with torch.autocast(hidden_PH.device.type, enabled=False):
        projection = projection.in_dtype(compute)
        parts = [projection.logits(part_cH).topk(count).indices for part_cH in hidden_PH.split(chunk)]
    return torch.cat(parts)


def logits_of(hidden_PH: Tensor, projection: Projection, token_PC: Tensor, chunk: int) -> Tensor:
    """fp32 logits [P, C] of some tokens, with a gradient to `hidden_PH`; rows of the frozen projection are looked up
    again in the backward pass, and not kept."""
    parts = zip(hidden_PH.split(chunk), token_PC.split(chunk), strict=True)
    compute = compute_dtype(hidden_PH)
    with torch.autocast(hidden_PH.device.type, enabled=False):
        made = [
            checkpoint(_rows, part_cH.to(compute), projection, part_cC, use_reentrant=False)
            for part_cH, part_cC in parts
        ]
    return projection.shaping(torch.cat(made))


def _rows(hidden_cH: Tensor, projection: Projection, token_cC: Tensor) -> Tensor:
    row_cCH = projection.weight_VH[token_cC].to(hidden_cH.dtype)
    product_cC = (row_cCH @ hidden_cH[..., None]).squeeze(-1).float()
    return product_cC if projection.bias_V is None else product_cC + projection.bias_V[token_cC].float()
