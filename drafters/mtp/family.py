"""MTP modules: loaded, and drafting as EAGLE does, a chain or a tree, by the target's projection.

Read next: `net.py`, the network; `../eagle/proposer.py`, how it drafts. Shapes: B rows, N nodes, H hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.hidden_states import check_states
from ..config import DrafterConfig
from ..eagle.proposer import EAGLE_1_TREE, Eagle
from ..folder import read_settings
from ..projection import check_logits
from ..tree_file import named_tree
from ..weights import net_for
from .net import MtpNet


def load_mtp_folder(folder: Path, target: Backbone, *, draft_length: int, config: DrafterConfig) -> Mtp:
    """An MTP module, on the tree that `config` chooses.

    Raises:
        RequestError: the folder holds no MTP module, or one for another target; or the target makes its logits in a
            way of its own, or has no such hidden state.
    """
    _, sizes = read_settings(folder, target, Mtp.family)
    check_logits(target.model)  # by whose projection it drafts
    net = net_for(folder, target, lambda: MtpNet.from_settings(sizes), "an MTP module")
    check_states((net.reads,), target.model, folder / "config.json")
    return Mtp(
        net,
        target,
        tree=config.eagle.tree,
        draft_length=draft_length,
        policy=config.policy,
        factors=config.temperature_factors,
        ids=config.draft_ids,
        paths=named_tree(config.tree, folder, draft_length) or EAGLE_1_TREE,
        top_k=config.eagle.top_k,
        nodes=config.eagle.nodes,
    )


def draft_by_mtp(module: nn.Module, target: Backbone, draft_length: int) -> Mtp:
    """An MTP module in training, on its default tree."""
    return Mtp(cast(MtpNet, module), target, draft_length=draft_length)


class Mtp(Eagle):
    """Drafts with an MTP module."""

    family = "mtp"
    net: MtpNet

    def __init__(self, net: MtpNet, target: Backbone, **settings: Any) -> None:
        """`settings`: those of `Eagle`."""
        super().__init__(net, target, **settings)
        self.layers = (net.reads,)

    def _read(self, hidden_BNH: Tensor) -> Tensor:
        return self.net.head_input(hidden_BNH)
