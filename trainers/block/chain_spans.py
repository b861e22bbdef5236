"""Masked chains of long rows without a mask of all by all: who sees whom as spans of keys.

A row is its tokens and, behind them, its masks, chain by chain. A token sees those of its document up to itself: one
span. A mask sees the text up to its anchor, and its own chain up to itself: two spans, of which a layer's window takes
a part. So four numbers say of each token what it sees. Read next: `masked_chains.py`, the chains;
`drafters/layers/spans.py`, what they are to a model's layers.

Shapes: R rows, S tokens of a row, M masks of a row, N = S + M.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...decoding.backbone.hidden_states import decoder_of
from ...decoding.backbone.windows import Masks, Window, Windows
from ...decoding.on_host import on_host, sent
from ...drafters.layers.spans import BY_SPANS, first_seen, starts, why_not_by_spans
from ...errors import RequestError
from ..config import MASKED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .masked_chains import Chains


def chain_spans(config: Any, documents_RS: Tensor, chains: Chains) -> Masks:
    """What `Spans` takes, for each kind of layer of a model: what `chain_mask` says, [R, 1, N, 4].

    Padding sees itself alone, as filling does.

    Args:
        config: the model's.
        chains: nested, each mask behind the shallower ones of its chain.
    """
    host_RS, S, device = on_host(documents_RS), documents_RS.shape[1], documents_RS.device
    masks = chains._replace(anchor_RM=on_host(chains.anchor_RM), depth_RM=on_host(chains.depth_RM))
    index_RS = torch.arange(S).expand_as(host_RS)
    anchor_RN = torch.cat((index_RS, masks.anchor_RM), 1)
    depth_RN = torch.cat((torch.zeros_like(index_RS), masks.depth_RM), 1)
    # padding is document -1
    start_RN = starts(host_RS).where(host_RS >= 0, index_RS).gather(1, anchor_RN)
    is_filling_RN = torch.cat((torch.zeros_like(host_RS, dtype=torch.bool), ~masks.real_RM), 1)

    def through(window: Window | None) -> Tensor:
        seen_RN4 = _seen(start_RN, anchor_RN, depth_RN, is_filling_RN, window)
        return sent(seen_RN4[:, None], device)

    windows = Windows.of(config.get_text_config(decoder=True))
    return through(None) if windows is None else windows.each(through)


def _seen(
    start_RN: Tensor, anchor_RN: Tensor, depth_RN: Tensor, is_filling_RN: Tensor, window: Window | None
) -> Tensor:
    """int64 [R, N, 4]: first and last token of the text, and of the own chain, that each one sees."""
    index_RN = torch.arange(anchor_RN.shape[1]).expand_as(anchor_RN)
    near_RN = first_seen(start_RN, anchor_RN + depth_RN, window)
    # the mask at depth 1 is the first of a chain; of the text, which has none, this lies behind itself
    chain_RN = index_RN - depth_RN + (near_RN - anchor_RN).clamp_min(1)
    return torch.stack(
        (
            near_RN.where(~is_filling_RN, 1),
            anchor_RN.where(~is_filling_RN, 0),
            chain_RN.where(~is_filling_RN, index_RN),
            index_RN,
        ),
        -1,
    )


def check_spans(model: PreTrainedModel) -> None:
    """Raise RequestError for a model whose layers attend by what cannot go by spans."""
    if why := why_not_by_spans(decoder_of(model)):
        raise RequestError(
            f"{type(model).__name__} {why}, and rows of more than {MASKED:,} tokens of a PARD draft are read without "
            f"a mask, by a model that attends by one of {', '.join(BY_SPANS)}; lower --data.sequence_length to "
            f"{MASKED} or less, or take another model.start_from"
        )
