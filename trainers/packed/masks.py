"""What a token of a packed row may see: itself and earlier tokens of its document, through its layer's window.

Read next: `passes.py`, which reads rows so; `decoding/backbone/windows.py`, windows of layers.

Shapes: R rows, S tokens of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...decoding.backbone.windows import Masks, Window, Windows
from ...decoding.on_host import on_host, sent
from ...drafters.layers.spans import first_seen, starts


def document_mask(documents_RS: Tensor) -> Tensor:
    """bool [R, 1, S, S], True where a token may attend: to itself and earlier tokens of its document."""
    S = documents_RS.shape[1]
    same_RSS = documents_RS[:, :, None] == documents_RS[:, None, :]
    causal_SS = torch.ones(S, S, dtype=torch.bool, device=documents_RS.device).tril()
    # padding is document -1: it attends to padding only, and no row of the mask is empty
    return (same_RSS & causal_SS)[:, None]


def row_masks(config: Any, documents_RS: Tensor, positions_RS: Tensor) -> Masks:
    """`document_mask`, as each kind of layer of a model sees it: through its window, if it has one.

    Args:
        config: the model's.
        positions_RS: of every token in its document.
    """
    mask = document_mask(documents_RS)
    windows = Windows.of(config.get_text_config(decoder=True))
    if windows is None or documents_RS.shape[1] <= windows.shortest:
        return mask
    return windows.masks(mask, positions_RS, positions_RS)


def row_spans(config: Any, documents_RS: Tensor) -> Masks:
    """What `row_masks` says as spans, int64 [R, 1, S, 4] for each kind of layer; padding sees itself alone."""
    host_RS = on_host(documents_RS)
    index_RS = torch.arange(host_RS.shape[1]).expand_as(host_RS)
    start_RS = starts(host_RS).where(host_RS >= 0, index_RS)  # padding is document -1
    empty_RS2 = torch.tensor([1, 0]).expand(*host_RS.shape, 2)

    def through(window: Window | None) -> Tensor:
        near_RS = first_seen(start_RS, index_RS, window)
        seen_RS4 = torch.cat((near_RS[..., None], index_RS[..., None], empty_RS2), -1)
        return sent(seen_RS4[:, None], documents_RS.device)

    windows = Windows.of(config.get_text_config(decoder=True))
    return through(None) if windows is None else windows.each(through)
