"""A drafter's module from what its folder's `config.json` holds: no weights read, no target in memory."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.block.net import BlockNet
from draftsmith.drafters.eagle.net import EagleNet
from draftsmith.drafters.eagle.net3 import Eagle3Net
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.heads.bpd import BpdHeads
from draftsmith.drafters.heads.hydra import HydraHeads
from draftsmith.drafters.heads.medusa import MedusaHeads
from draftsmith.drafters.mtp.net import MtpNet
from draftsmith.drafters.record import function
from helpers.models.small_drafters import small_dflash2_net, small_dspark_net, small_peagle_net
from torch import nn

FRESH: dict[str, Any] = {
    "medusa": lambda model: MedusaHeads.for_target(model, heads=2, layers=2),
    "medusa, shared head": lambda model: MedusaHeads.for_target(model, heads=2, shared_head=True),
    "hydra": lambda model: HydraHeads.for_target(model, heads=3, layers=2),
    "hydra++": lambda model: HydraHeads.for_target(model, heads=3, layers=2, prefix=True),
    "bpd": lambda model: BpdHeads.for_target(model, block=4, inner=8),
    "eagle": EagleNet.for_target,
    "eagle3": lambda model: Eagle3Net.for_target(model, layers=(0, 1, 2), ids=range(0, 61, 2)),
    "eagle3.1": lambda model: Eagle3Net.for_target(model, layers=(0, 2), ids=range(9), feature_norms=True),
    "dflash": lambda model: BlockNet.for_target(
        model, layers=(0, 2), decoder_layers=2, size=4, layout="fill-in", causal=False
    ),
    "dflash, unused id": lambda model: BlockNet.for_target(
        model, layers=(1,), decoder_layers=1, size=3, layout="anchor-first", causal=True, mask_token=7
    ),
    "dflash2": lambda model: small_dflash2_net(model),
    "dspark": lambda model: small_dspark_net(model),
    "peagle": lambda model: small_peagle_net(model),
    "mtp": lambda model: MtpNet.for_target(model, state="before"),
}


def test_every_family_that_is_built_from_settings_is_here() -> None:
    known = {name for name, family in FAMILIES.items() if family.build}
    assert {name.partition(",")[0].partition(".")[0] for name in FRESH} == known


def tensors(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("family", FRESH)
def test_settings_alone_make_the_module_anew(family: str, target: Backbone) -> None:
    fresh = FRESH[family](target.model)
    settings = json.loads(json.dumps(asdict(fresh.config)))
    with torch.device("meta"):
        again = function(FAMILIES[fresh.family].build or "")(settings)
    assert again.config == fresh.config
    assert tensors(again) == tensors(fresh)
    assert all(tensor.is_meta for tensor in again.state_dict().values())


@pytest.mark.parametrize("family", FRESH)
def test_a_target_of_shapes_alone_is_enough(family: str, target: Backbone) -> None:
    with torch.device("meta"):
        skeleton = type(target.model)(target.model.config)
        fresh = FRESH[family](skeleton)
    assert tensors(fresh) == tensors(FRESH[family](target.model))
    assert all(tensor.is_meta for tensor in fresh.state_dict().values())
