"""What `families.py` names of the EAGLE family: load, draft while training.

Read next: `net.py` and `net3.py`, the networks; `proposer.py`, how they draft.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import nn

from ..config import DrafterConfig
from ..tree_file import named_tree
from .loading import load_eagle, load_peagle
from .net import EagleNet
from .net3 import Eagle3Net
from .parallel import Peagle
from .peagle import PeagleNet
from .proposer import EAGLE_1_TREE, Eagle, Eagle3

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone


def load_eagle_folder(folder: Path, target: Backbone, *, draft_length: int, config: DrafterConfig) -> Eagle:
    """EAGLE-1 or EAGLE-3; errors as for `load_eagle`."""
    return load_eagle(
        folder,
        target,
        tree=config.eagle_tree,
        draft_length=draft_length,
        policy=config.policy,
        factors=config.temperature_factors,
        paths=named_tree(config.tree, folder, draft_length) or EAGLE_1_TREE,
        top_k=config.eagle_top_k,
        nodes=config.eagle_nodes,
    )


def draft_by_eagle(module: nn.Module, target: Backbone, draft_length: int) -> Eagle:
    """EAGLE-1 in training, on its default tree."""
    return Eagle(cast(EagleNet, module), target, draft_length=draft_length)


def draft_by_eagle3(module: nn.Module, target: Backbone, draft_length: int) -> Eagle3:
    """EAGLE-3 in training, on its default tree."""
    return Eagle3(cast(Eagle3Net, module), target, draft_length=draft_length)


def load_peagle_folder(folder: Path, target: Backbone, *, draft_length: int, config: DrafterConfig) -> Peagle:
    """P-EAGLE; errors as for `load_peagle`."""
    return load_peagle(
        folder, target, draft_length=draft_length, policy=config.policy, factors=config.temperature_factors
    )


def draft_by_peagle(module: nn.Module, target: Backbone, draft_length: int) -> Peagle:
    """P-EAGLE in training."""
    return Peagle(cast(PeagleNet, module), target, draft_length=draft_length)
