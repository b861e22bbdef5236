"""What `families.py` names of MTP modules: load, draft while training.

Read next: `net.py`, the network; `proposer.py`, how it drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import nn

from ...decoding.backbone.hidden_states import check_states
from ..config import DrafterConfig
from ..eagle.proposer import EAGLE_1_TREE
from ..folder import read_settings
from ..projection import check_logits
from ..tree_file import named_tree
from ..weights import net_for
from .net import MtpNet
from .proposer import Mtp

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone


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
        tree=config.eagle_tree,
        draft_length=draft_length,
        policy=config.policy,
        factors=config.temperature_factors,
        paths=named_tree(config.tree, folder, draft_length) or EAGLE_1_TREE,
        top_k=config.eagle_top_k,
        nodes=config.eagle_nodes,
    )


def draft_by_mtp(module: nn.Module, target: Backbone, draft_length: int) -> Mtp:
    """An MTP module in training, on its default tree."""
    return Mtp(cast(MtpNet, module), target, draft_length=draft_length)
