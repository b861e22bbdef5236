"""Untrained drafters of every family that rides on a target, shaken, so that some tokens are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from conftest import VOCABULARY
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.proposal import Committed, Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters import families
from draftsmith.drafters.block.dspark import DSpark, DSparkNet
from draftsmith.drafters.block.net import BlockNet
from draftsmith.drafters.block.proposer import DFlash
from draftsmith.drafters.block.selected import DFlash2, DFlash2Net
from draftsmith.drafters.eagle.net import EagleNet, EagleShape
from draftsmith.drafters.eagle.net3 import Eagle3Net, Eagle3Shape
from draftsmith.drafters.eagle.parallel import Peagle
from draftsmith.drafters.eagle.peagle import PeagleNet
from draftsmith.drafters.eagle.proposer import Eagle, Eagle3
from draftsmith.drafters.heads.bpd import Bpd, BpdHeads
from draftsmith.drafters.heads.hydra import HydraHeads, hydra_on
from draftsmith.drafters.heads.medusa import Medusa, MedusaHeads
from draftsmith.drafters.mtp.family import Mtp
from draftsmith.drafters.mtp.net import MtpNet
from torch import Tensor, nn

FAMILIES = [name for name, family in families.FAMILIES.items() if family.build]
WORDS = [word for word in range(VOCABULARY) if word % 3 != 1]  # those that EAGLE-3 drafts


def make_on_target(family: str, target: Backbone, *, noise: float = 0.05, **settings) -> Any:
    """A drafter beside its target; `settings` are those of its proposer, EAGLE's tree being static by default."""
    torch.manual_seed(0)
    model = target.model

    def shaken(module: nn.Module) -> Any:
        return _shaken(module, noise).to(model.device)

    if family == "medusa":
        return Medusa(shaken(MedusaHeads.for_target(model, heads=4)), target, **settings)
    if family == "bpd":
        return Bpd(shaken(BpdHeads.for_target(model, block=5)), target, **settings)
    if family.startswith("hydra"):
        heads = HydraHeads.for_target(model, heads=4, layers=2, prefix=family == "hydra++")
        return hydra_on(shaken(heads), target, **settings)
    if family == "dflash":
        return DFlash(shaken(small_block_net(model)), target, **settings)
    if family == "dflash2":
        return DFlash2(shaken(small_dflash2_net(model)), target, **settings)
    if family == "dspark":
        net = small_dspark_net(model, confidence="least" in settings)
        return DSpark(shaken(net), target, **settings)
    if family == "peagle":
        return Peagle(shaken(_passing_on(small_peagle_net(model))), target, **settings)
    settings = {"tree": "static"} | settings
    if family == "mtp":
        return Mtp(shaken(_passing_on(MtpNet.for_target(model))), target, **settings)
    if family == "eagle":
        net = _passing_on(EagleNet(EagleShape.of(model.config)))
        return Eagle(shaken(net), target, **settings)
    shape = Eagle3Shape.of(model.config, layers=(0, 1, 2), vocabulary=VOCABULARY, draft_vocabulary=len(WORDS))
    net3 = _passing_on(Eagle3Net(shape, WORDS))
    with torch.no_grad():
        net3.lm_head.weight.copy_(model.get_output_embeddings().weight[WORDS])
    return Eagle3(shaken(net3), target, **settings)


def small_block_net(model: Any, **chosen: Any) -> BlockNet:
    """Two layers over three states, four drafts of a block."""
    sizes = {"layers": (0, 1, 2), "decoder_layers": 2, "size": 5, "layout": "fill-in", "causal": False}
    return BlockNet.for_target(model, **(sizes | chosen))


def small_peagle_net(model: Any, **chosen: Any) -> PeagleNet:
    """Two layers over three states, which draft the tokens of `WORDS`."""
    return PeagleNet.for_target(model, **({"ids": WORDS, "layers": (0, 1, 2), "decoder_layers": 2} | chosen))


def small_dflash2_net(model: Any, **chosen: Any) -> DFlash2Net:
    """Two layers over three states, four drafts of a block, a choice among five tokens that says something."""
    sizes = {"layers": (0, 1, 2), "decoder_layers": 2, "size": 5, "layout": "fill-in", "causal": False}
    own = {"vocabulary": VOCABULARY, "rank": 6, "candidates": 5, "group": 8}
    net = DFlash2Net.for_target(model, **(sizes | own | chosen))
    with torch.no_grad():
        net.candidate_selector.successor_codebook.weight.normal_(std=0.5)
    return net


def small_dspark_net(model: Any, **chosen: Any) -> DSparkNet:
    """Two layers over three states, three drafts of a block, a head of rank 6 that says something."""
    sizes = {"layers": (0, 1, 2), "decoder_layers": 2, "size": 3, "layout": "anchor-first", "causal": False}
    net = DSparkNet.for_target(model, **(sizes | {"vocabulary": VOCABULARY, "rank": 6} | chosen))
    with torch.no_grad():
        net.markov_head.markov_w2.weight.normal_(std=0.5)
    return net


def _passing_on(net: Any) -> Any:
    """A network whose guess is the last state that it was given, as new heads say it again."""
    with torch.no_grad():
        net.fc.weight.zero_()
        net.fc.weight[:, -net.config.hidden :] = torch.eye(net.config.hidden)
        for name, weight in net.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    return net


def _shaken(module: nn.Module, noise: float) -> Any:
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_((noise * torch.randn(parameter.shape, generator=g)).to(parameter.device))
    return module.requires_grad_(False).eval()


class WatchedHeads:
    """Heads on a tree that keep, for every proposal, how much of each row's text was known, and
    the logits."""

    def reset(self, prompts: Any, room: int, *, static: bool = False) -> None:
        super().reset(prompts, room, static=static)
        self.lengths = [len(prompt) for prompt in prompts]
        self.accepted = 0
        self.met: list[tuple[list[int], Tensor]] = []

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        self.met.append((list(self.lengths), self.logits()))
        return super().propose(last_B, warper, uniforms)

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        counts = committed.count_B.tolist()
        self.accepted += sum(max(0, count - 1) for count in counts)
        self.lengths = [old + count for old, count in zip(self.lengths, counts, strict=True)]


class WatchedMedusa(WatchedHeads, Medusa):
    """Medusa that keeps what it met."""


class WatchedBpd(WatchedHeads, Bpd):
    """BPD that keeps what it met."""


def change_target_of(folder: Path, field: str) -> None:
    """Let a checkpoint say that it was made for a target that differs in one field."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    wrong = {"tokenizer": "0" * 64, "vocabulary": 7, "hidden_size": 8}[field]
    config["draftsmith"]["target"][field] = wrong
    path.write_text(json.dumps(config))
