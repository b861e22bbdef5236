"""What `families.py` names of block drafters: load, draft while training.

Read next: `net.py`, the network; `proposer.py`, how it drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ...decoding.backbone.hidden_states import check_states
from ...errors import RequestError
from ..config import DrafterConfig
from ..folder import read_settings
from ..projection import check_logits
from ..weights import net_for
from .dspark import DSpark, DSparkNet
from .net import BlockNet
from .proposer import DFlash
from .selected import DFlash2, DFlash2Net, check_tree
from .trees import TreeShape

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone


_DRAFTERS: dict[str, tuple[type[BlockNet], type[DFlash]]] = {
    DFlash.family: (BlockNet, DFlash),
    DSpark.family: (DSparkNet, DSpark),
    DFlash2.family: (DFlash2Net, DFlash2),
}
"""By the family: network and proposer."""


def load_block_folder(folder: Path, target: Backbone, *, draft_length: int, config: DrafterConfig) -> DFlash:
    """A block drafter of a folder, which drafts `draft_length` tokens or as many as its block has.

    Raises:
        RequestError: the folder is no block drafter, or was made for another target; or the target makes
            logits in a way of its own.
    """
    family, sizes = read_settings(folder, target, *_DRAFTERS)
    check_logits(target.model)  # whose projection it drafts by
    net = net_for(folder, target, lambda: _DRAFTERS[family][0].from_settings(sizes), "a block drafter")
    check_states(net.config.layers, target.model, folder / "config.json")
    _check_mask(net, target, folder)
    return _drafting(net, target, draft_length, config)


def _check_mask(net: BlockNet, target: Backbone, folder: Path) -> None:
    """Raise RequestError where the mask is not the embedding of its token, which engines take for it."""
    token = net.config.mask_token
    if token is None:
        return
    table: Any = target.model.get_input_embeddings()
    known = len(table.weight)
    if token < known:
        row_H, mask_H = table(torch.tensor(token, device=target.device)), net.mask_embedding.weight[0]
        # either may have been rounded to half precision
        if torch.allclose(row_H.float(), mask_H.float(), rtol=0.02, atol=1e-3):
            return
    what = "weights whose mask is another vector" if token < known else f"a target with ids 0 to {known - 1}"
    raise RequestError(
        f"{folder / 'config.json'}: mask_token is {token}, beside {what}; the folder is damaged, or the drafter is of "
        "another target"
    )


def draft_by_block(module: nn.Module, target: Backbone, draft_length: int) -> DFlash:
    """A block drafter in training."""
    return _drafting(cast(BlockNet, module), target, draft_length, DrafterConfig())


def _drafting(net: BlockNet, target: Backbone, draft_length: int, config: DrafterConfig) -> DFlash:
    longest = min(draft_length, net.config.most)
    make = _DRAFTERS[net.family][1]
    how: dict[str, Any] = {"policy": config.policy, "factors": config.temperature_factors, "least": config.confidence}
    if config.block_tree == "tree":
        shape = TreeShape(config.block_nodes, config.block_children)
        how["tree"] = shape.of_leaves(longest) if make is DFlash else shape
        if isinstance(net, DFlash2Net):
            check_tree(config.block_children, net.config.candidates)
    return make(net, target, draft_length=longest, **how)
