"""The heads and feature drafters that ship, with tiny random networks over a table.

Their weights are drawn, not trained: what a drafter proposes is none of losslessness, how it proposes
is. The very classes that draft for a trained pair draft here. Read next: `table.py`, `../toys.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ....decoding.proposal import Proposer
from ....drafters.block.dspark import DSpark, DSparkNet, DSparkShape
from ....drafters.block.net import BlockNet, BlockShape
from ....drafters.block.proposer import DFlash
from ....drafters.block.selected import DFlash2, DFlash2Net, DFlash2Shape
from ....drafters.eagle.net import EagleNet, EagleShape
from ....drafters.eagle.net3 import Eagle3Net, Eagle3Shape
from ....drafters.eagle.parallel import Peagle
from ....drafters.eagle.peagle import PeagleNet, PeagleShape
from ....drafters.eagle.proposer import Eagle, Eagle3
from ....drafters.heads.bpd import Bpd, BpdHeads, BpdShape
from ....drafters.heads.hydra import HydraHeads, HydraShape, hydra_on
from ....drafters.heads.medusa import Medusa, MedusaHeads, MedusaShape
from ....drafters.layers.llama import LayerShape
from ....drafters.mtp.family import Mtp
from ....drafters.mtp.layers import MtpShape
from ....drafters.mtp.net import MtpNet
from .table import HIDDEN, TableModel

PATHS = ((0,), (1,), (0, 0), (0, 1), (1, 0))
SIBLINGS = ((0,), (1,), (2,), (1, 0), (1, 1), (1, 2))
_LAYER: dict[str, Any] = {
    "hidden": HIDDEN,
    "intermediate": 8,
    "heads": 2,
    "kv_heads": 1,
    "head_size": 4,
    "rope_theta": 10_000.0,
    "eps": 1e-5,
}


def medusa(target: TableModel) -> Proposer:
    """Medusa's heads on a static tree."""
    heads = MedusaHeads(MedusaShape(2, 1, HIDDEN, target.vocabulary))
    return Medusa(_shaken(heads, target), target.as_backbone(), paths=PATHS)


def bpd(target: TableModel) -> Proposer:
    """A block of three: two tokens behind the target's own."""
    heads = BpdHeads(BpdShape(3, 4, HIDDEN, target.vocabulary))
    return Bpd(_shaken(heads, target), target.as_backbone())


def hydra(target: TableModel, *, prefix: bool = False) -> Proposer:
    """Hydra's heads on a static tree, or Hydra++'s with its layer in front."""
    layer = LayerShape(**_LAYER) if prefix else None
    heads = HydraHeads(HydraShape(2, 2, HIDDEN, target.vocabulary, False, layer))
    return hydra_on(_shaken(heads, target), target.as_backbone(), paths=PATHS)


def eagle(target: TableModel, **settings: Any) -> Proposer:
    """EAGLE-1's or EAGLE-2's network, which reads the last state and drafts by the target's projection."""
    net = EagleNet(EagleShape(**_LAYER))
    return Eagle(_shaken(net, target), target.as_backbone(), **(_TREE | settings))


def eagle3(target: TableModel, **settings: Any) -> Proposer:
    """EAGLE-3's network over three states, which drafts two of three tokens."""
    words = target.vocabulary - 1
    shape = Eagle3Shape(**_LAYER, layers=(0, 1, 2), vocabulary=target.vocabulary, draft_vocabulary=words)
    net = Eagle3Net(shape, [word for word in range(target.vocabulary) if word != 1])
    return Eagle3(_shaken(net, target), target.as_backbone(), **(_TREE | settings))


def mtp(target: TableModel, **settings: Any) -> Proposer:
    """An MTP module, which drafts by the target's projection."""
    net = MtpNet(MtpShape(**_LAYER, rotary=_LAYER["head_size"]))
    return Mtp(_shaken(net, target), target.as_backbone(), **(_TREE | settings))


def peagle(target: TableModel, **settings: Any) -> Proposer:
    """Two layers over three states, a mask pair behind the true ones, two of three tokens."""
    words = [word for word in range(target.vocabulary) if word != 1]
    sizes: dict[str, Any] = {"vocabulary": target.vocabulary, "draft_vocabulary": len(words), "decoder_layers": 2}
    net = PeagleNet(PeagleShape(**_LAYER, layers=(0, 1, 2), **sizes), words)
    return Peagle(_shaken(net, target), target.as_backbone(), **({"draft_length": 2} | settings))


def dflash(target: TableModel, **settings: Any) -> Proposer:
    """A block of three slots over two states, two layers: slots see each other both ways."""
    shape = BlockShape(**_LAYER, layers=(0, 2), decoder_layers=2, size=3, layout="fill-in", causal=False)
    return DFlash(_shaken(BlockNet(shape), target), target.as_backbone(), **settings)


def dspark(target: TableModel, **settings: Any) -> Proposer:
    """Two slots that both draft, a head that says something of every token, and doubts if drafts are cut.

    It doubts the second draft more than the first, so that drafts of every length are kept.
    """
    sizes: dict[str, Any] = {
        "layers": (0, 2),
        "decoder_layers": 2,
        "size": 2,
        "layout": "anchor-first",
        "causal": False,
    }
    shape = DSparkShape(**_LAYER, **sizes, vocabulary=target.vocabulary, rank=2, confidence="least" in settings)
    net = _shaken(DSparkNet(shape), target)
    if net.confidence_head is not None:
        net.confidence_head.proj.weight.neg_()
    return DSpark(net, target.as_backbone(), **settings)


def dflash2(target: TableModel, **settings: Any) -> Proposer:
    """Three slots that mix along their block, and a choice among two of a slot's tokens by the one in front."""
    sizes: dict[str, Any] = {"layers": (0, 2), "decoder_layers": 2, "size": 3, "layout": "fill-in", "causal": False}
    own: dict[str, Any] = {"vocabulary": target.vocabulary, "rank": 2, "candidates": 2, "group": 2}
    net = DFlash2Net(DFlash2Shape(**_LAYER, **sizes, **own))
    return DFlash2(_shaken(net, target), target.as_backbone(), **settings)


_TREE: dict[str, Any] = {"draft_length": 2, "paths": PATHS, "top_k": 2, "nodes": 6}


def _shaken(module: nn.Module, target: TableModel) -> Any:
    """The module with weights that are drawn, the same ones every time, on the target's device."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=g))
    return module.requires_grad_(False).eval().to(target.device)
