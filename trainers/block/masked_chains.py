"""Masked chains over a known text: the passes that a PARD draft makes while decoding, many in one.

An et al. 2025 (arXiv 2504.18583). A chain hangs on its anchor, the last true token that it sees; its mask at
depth i stands i tokens behind and predicts the token after that place. The paper's copy i of the text is the
masks of depth i. Deeper masks are dropped at random (conditional drop, COD), so that the work grows with what
is kept: a mask at depth i is kept only where the one in front of it is. Read next: `pard.py`, the loss;
`chain_spans.py`, the same for long rows; `drafters/model/pard.py`, which decodes; `anchors.py`, which
tokens have a label.

Shapes: R rows, S tokens of a row, K drafts, M masks of a row, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...data.features.store import row_keys
from ...decoding.backbone.hidden_states import decoder_of
from ...decoding.backbone.recurrence.scan import is_recurrent
from ...decoding.backbone.windows import Masks, Windows
from ...decoding.on_host import all_on_host, sent
from ...drafters.layers.spans import attending_by_spans
from ...errors import RequestError
from ..loop.objective import Batch
from ..loop.order import scores
from ..packed.masks import document_mask
from ..packed.passes import are_long, hidden_states
from .anchors import anchors_at
from .chain_spans import chain_spans

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STEP = 64
"""Masks of a row are filled up to a multiple of this: on a CPU every new shape compiles kernels that stay."""


class Chains(NamedTuple):
    """The masks that are kept of some rows, chain by chain along depths; depth 0 where a row has fewer."""

    anchor_RM: Tensor
    """int64: where the last true token stands that the mask sees."""
    depth_RM: Tensor
    """int64, from 1; the mask stands at anchor + depth."""

    @property
    def real_RM(self) -> Tensor:
        """bool: no filling."""
        return self.depth_RM > 0

    @property
    def place_RM(self) -> Tensor:
        """int64: the token of the row in whose place the mask stands."""
        return self.anchor_RM + self.depth_RM


def drawn(batch: Batch, drafts: int, seed: int, *, keep: float, least: float) -> Chains:
    """The masks of a step, by its seed and each row's content alone.

    Of the anchors that have a label at depth i, the share max(keep^i, least) is kept on average: those whose one
    random number is below it. As the shares fall with the depth, chains are nested; none leaves its document or
    goes on behind a token that is no label.

    Args:
        drafts: K, the depth of the deepest mask and 1.
    """
    (R, S), device = batch["input_ids"].shape, batch["input_ids"].device
    # on the host, which has to know how many there are and what each sees
    known = all_on_host(batch)
    known_RSK = anchors_at(known, torch.arange(S).expand(R, S), drafts).known_RAK
    score_RS = torch.from_numpy(np.stack([scores(f"{seed}/{key}", S) for key in row_keys(known)]))
    share_K = torch.tensor([max(keep**depth, least) for depth in range(drafts)])
    chains = listed((known_RSK & (score_RS[..., None] < share_K))[..., 1:])
    return Chains(sent(chains.anchor_RM, device), sent(chains.depth_RM, device))


def listed(kept_RSD: Tensor) -> Chains:
    """The masks of `kept_RSD` [R, S, K - 1], depth 1 first, filled to the row that has most."""
    flat_RX = kept_RSD.flatten(1)
    most = int(flat_RX.sum(1).max())
    M = min(-(-most // _STEP) * _STEP, flat_RX.shape[1])
    order_RM = (~flat_RX).to(torch.uint8).argsort(dim=1, stable=True)[:, :M]
    depth_RM = torch.where(flat_RX.gather(1, order_RM), order_RM % max(1, kept_RSD.shape[2]) + 1, 0)
    return Chains(order_RM // max(1, kept_RSD.shape[2]), depth_RM)


def chain_mask(documents_RS: Tensor, chains: Chains) -> Tensor:
    """bool [R, 1, S + M, S + M], True where a place may attend: the row's tokens first, then its masks.

    Tokens see tokens as ever and no mask. A mask sees the tokens of its document up to its anchor, and of its own
    chain what is not behind it. Filling sees itself, so that no row of the mask is empty.
    """
    R, S = documents_RS.shape
    anchor_RM, depth_RM = chains
    M = anchor_RM.shape[1]
    true_R1SS = document_mask(documents_RS)
    # what the anchor sees is what its masks see of the text
    text_RMS = true_R1SS[:, 0].gather(1, anchor_RM[..., None].expand(-1, -1, S)) & chains.real_RM[..., None]
    both_RMM = chains.real_RM[:, :, None] & chains.real_RM[:, None]
    own_RMM = both_RMM & (anchor_RM[:, :, None] == anchor_RM[:, None]) & (depth_RM[:, :, None] >= depth_RM[:, None])
    own_RMM = own_RMM | torch.eye(M, dtype=torch.bool, device=own_RMM.device)
    none_RSM = torch.zeros(R, S, M, dtype=torch.bool, device=own_RMM.device)
    upper = torch.cat((true_R1SS[:, 0], none_RSM), 2)
    return torch.cat((upper, torch.cat((text_RMS, own_RMM), 2)), 1)[:, None]


def chain_states(model: PreTrainedModel, batch: Batch, chains: Chains, mask_id: int) -> tuple[Tensor, Tensor]:
    """Last hidden states of the row's tokens [R, S, H] and of its masks [R, M, H], in one pass.

    Without any mask it is the pass of an ordinary language model. Rows that go without a mask of rows by rows
    (`are_long`) have none of text and masks either.

    Raises:
        RequestError: as for `hidden_states`; or the model has recurrent layers, which no mask keeps apart.
    """
    M = chains.anchor_RM.shape[1]
    if M == 0:
        hidden_RSH = hidden_states(model, batch)
        return hidden_RSH, hidden_RSH[:, :0]
    decoder: Any = decoder_of(model)
    if is_recurrent(decoder):
        raise RequestError(
            f"{type(decoder).__name__} has recurrent layers, which fold chains and text into one state; "
            "expected a draft whose layers all attend: take another model.start_from"
        )
    ids_RS, positions_RS = batch["input_ids"], batch["positions"]
    ids = torch.cat((ids_RS, torch.full_like(chains.anchor_RM, mask_id)), 1)
    positions = torch.cat((positions_RS, positions_RS.gather(1, chains.anchor_RM) + chains.depth_RM), 1)
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    if are_long(ids_RS.shape[1]):
        spans = chain_spans(decoder.config, batch["documents"], chains)
        with attending_by_spans(decoder):
            out = decoder(attention_mask=spans, **inputs).last_hidden_state
    else:
        masks = _windowed(decoder.config, chain_mask(batch["documents"], chains), positions)
        out = decoder(attention_mask=masks, **inputs).last_hidden_state
    return out[:, : ids_RS.shape[1]], out[:, ids_RS.shape[1] :]


def _windowed(config: Any, mask: Tensor, positions: Tensor) -> Masks:
    """The mask as each kind of layer sees it, through its window if it has one."""
    windows = Windows.of(config.get_text_config(decoder=True))
    if windows is None or mask.shape[-1] <= windows.shortest:
        return mask
    return windows.masks(mask, positions, positions)
