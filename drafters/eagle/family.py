"""What `families.py` names of the EAGLE family: load, draft while training.

Read next: `net.py` and `net3.py`, the networks; `proposer.py`, how they draft.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ...decoding.backbone.hidden_states import check_states
from ..config import DrafterConfig
from ..folder import read_settings
from ..projection import check_logits
from ..tree_file import named_tree
from ..weights import net_for
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
        tree=config.eagle.tree,
        draft_length=draft_length,
        policy=config.policy,
        factors=config.temperature_factors,
        ids=config.draft_ids,
        paths=named_tree(config.tree, folder, draft_length) or EAGLE_1_TREE,
        top_k=config.eagle.top_k,
        nodes=config.eagle.nodes,
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
        folder,
        target,
        draft_length=draft_length,
        policy=config.policy,
        factors=config.temperature_factors,
        ids=config.draft_ids,
    )


def draft_by_peagle(module: nn.Module, target: Backbone, draft_length: int) -> Peagle:
    """P-EAGLE in training."""
    return Peagle(cast(PeagleNet, module), target, draft_length=draft_length)


def load_eagle(folder: str | Path, target: Backbone, **settings: Any) -> Eagle:
    """Load a drafter folder of EAGLE-1 or EAGLE-3 for `target`; `settings` are those of `Eagle`.

    Raises:
        RequestError: the folder is no EAGLE drafter, or was made for another target; EAGLE-1, which
            drafts by the target's projection, where the target makes logits in a way of its own.
    """
    path = Path(folder)
    family, sizes = read_settings(path, target, Eagle.family, Eagle3.family)
    what = f"an {family} network"
    if family == Eagle3.family:
        net = net_for(path, target, lambda: Eagle3Net.from_settings(sizes), what)
        check_states(net.config.layers, target.model, path / "config.json")
        return Eagle3(net, target, **settings)
    check_logits(target.model)  # whose projection EAGLE-1 drafts by
    return Eagle(net_for(path, target, lambda: EagleNet.from_settings(sizes), what), target, **settings)


def load_peagle(folder: Path, target: Backbone, **settings: Any) -> Peagle:
    """Load a drafter folder of P-EAGLE for `target`; `settings` are those of `Peagle`.

    Raises:
        RequestError: the folder is no P-EAGLE drafter, or was made for another target.
    """
    _, sizes = read_settings(folder, target, Peagle.family)
    net = net_for(folder, target, lambda: PeagleNet.from_settings(sizes), "a peagle network")
    check_states(net.config.layers, target.model, folder / "config.json")
    return Peagle(net, target, **settings)
