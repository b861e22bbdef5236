"""What the frozen target says of drafted tokens: one pass over them alone, behind the keys and values of the text.

The pass that makes a step's hidden states keeps its keys and values, and the drafts of all places are read behind
them: each sees the text of its document up to its root, and the earlier tokens of its own draft. No token of the text
is read twice, and no row is copied. Read next: `objective.py`; `../teacher/features.py`, the pass over the text.

Shapes: R rows, S tokens of a row, A places of a row, J drafts behind one, N = A (J - 1) tokens that are read of a row,
X places of all rows, T = J + 1 tokens of a root and its drafts, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...decoding.backbone.windows import Masks, Windows
from ..loop.objective import Batch
from ..teacher.features import OnlineFeatures
from .places import Places


class TextKept:
    """The keys and values of some rows, behind which the target reads drafts: once, they go with it."""

    def __init__(self, features: OnlineFeatures, kv_cache: DynamicCache, rows: Tensor) -> None:
        """`rows`: int64, those of the cache's that have places."""
        self._features, self._rows = features, rows
        self._kv_cache: DynamicCache | None = kv_cache

    @torch.no_grad()
    def states(self, batch: Batch, hidden_RSH: Tensor, places: Places, token_XT: Tensor) -> Tensor:
        """The target's last hidden states at a root and behind each of its drafts, [X, T, H]; zeros behind the last.

        Args:
            batch: of the rows that have places.
            hidden_RSH: their last states.
            token_XT: a root and its drafts.
        """
        root_X1H = hidden_RSH[places.row_X, places.at_X + 1][:, None]
        J = token_XT.shape[1] - 1
        found = [root_X1H]
        if J > 1:
            found.append(self._behind(batch, places, token_XT[:, 1:-1]))
        return torch.cat((*found, torch.zeros_like(root_X1H)), 1)

    def _behind(self, batch: Batch, places: Places, token_XD: Tensor) -> Tensor:
        """The states behind the drafts that others follow, [X, D, H]."""
        (R, A), D = places.at_RA.shape, token_XD.shape[1]
        token_RAD = token_XD.new_zeros(R, A, D).index_put((places.row_X, places.number_X), token_XD)
        root_RA = (places.at_RA + 1).clamp_max(batch["input_ids"].shape[1] - 1)
        depth_D = torch.arange(1, D + 1, device=root_RA.device)
        positions_RN = (batch["positions"].gather(1, root_RA)[..., None] + depth_D).flatten(1)
        kv_cache, self._kv_cache = self._kv_cache, None  # the drafts are written into it
        assert kv_cache is not None
        kv_cache.batch_select_indices(self._rows)
        inputs: dict[str, Any] = {
            "input_ids": token_RAD.flatten(1),
            "attention_mask": self._masks(batch, root_RA, positions_RN, D),
            "position_ids": positions_RN,
            "past_key_values": kv_cache,
            "use_cache": True,
        }
        states_RADH = self._features.read_behind(inputs).unflatten(1, (A, D))
        return states_RADH[places.row_X, places.number_X]

    def _masks(self, batch: Batch, root_RA: Tensor, positions_RN: Tensor, depth: int) -> Masks:
        mask = draft_mask(batch["documents"], root_RA, depth)
        windows = Windows.of(self._features.target.config.get_text_config(decoder=True))
        if windows is None:
            return mask
        return windows.masks(mask, positions_RN, torch.cat((batch["positions"], positions_RN), 1))


def draft_mask(documents_RS: Tensor, root_RA: Tensor, depth: int) -> Tensor:
    """bool [R, 1, N, S + N]: drafts of `depth` tokens behind each root see its document up to it, and themselves."""
    A, S = root_RA.shape[1], documents_RS.shape[1]
    root_RN = root_RA.repeat_interleave(depth, 1)
    same_RNS = documents_RS.gather(1, root_RN)[..., None] == documents_RS[:, None]
    index_S = torch.arange(S, device=root_RA.device)
    text_RNS = same_RNS & (index_S <= root_RN[..., None])
    past = torch.ones(depth, depth, dtype=torch.bool, device=root_RA.device).tril()
    own_NN = torch.block_diag(*[past] * A)
    return torch.cat((text_RNS, own_NN.expand(len(root_RA), -1, -1)), 2)[:, None]
