"""Every drafter that can learn along its own drafts: a small objective, a batch, and what a forward pass drafted.

Read next: `tests/trainers/own_drafts/test_parity.py`, which holds drafts to those of decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import VOCABULARY
from draftsmith.data.config import DataConfig
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.block.dspark import DSpark
from draftsmith.drafters.block.proposer import DFlash
from draftsmith.drafters.block.selected import DFlash2
from draftsmith.drafters.eagle.parallel import Peagle
from draftsmith.drafters.eagle.proposer import Eagle, Eagle3
from draftsmith.drafters.heads.hydra import hydra_on
from draftsmith.drafters.heads.medusa import Medusa
from draftsmith.drafters.mtp.family import Mtp
from draftsmith.trainers.config import LoopConfig
from draftsmith.trainers.method_config import (
    BlockConfig,
    DFlash2Config,
    DSparkConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    MtpConfig,
    PeagleConfig,
    RolloutsConfig,
)
from draftsmith.trainers.own_drafts.objective import OwnDrafts
from draftsmith.trainers.own_drafts.places import AT, UNIFORM, Places
from draftsmith.trainers.student.drafted import Drafted
from helpers.models.method_objectives import build

S, LENGTH = 40, 3
WORDS = [word for word in range(VOCABULARY) if word % 3 != 1]
BLOCKS = BlockConfig(size=4, decoder_layers=2, anchors=4)
Case = tuple[str, dict[str, Any], list[int] | None, Callable[..., Any]]


def chain(kind: Any) -> Callable[[Any, Backbone], Any]:
    return lambda net, target: kind(net, target, draft_length=LENGTH)


def likeliest(kind: Any) -> Callable[[Any, Backbone], Any]:
    return lambda net, target: kind(net, target, paths=[(0,) * depth for depth in range(1, LENGTH + 1)])


CASES: dict[str, Case] = {
    "eagle": ("eagle", {"eagle": EagleConfig(passes=LENGTH, noise=0.0)}, None, chain(Eagle)),
    "eagle, few tokens": (
        "eagle",
        {"eagle": EagleConfig(passes=LENGTH, noise=0.0, vocabulary=40)},
        WORDS[:40],
        chain(Eagle),
    ),
    "eagle3": ("eagle3", {"eagle3": Eagle3Config(passes=LENGTH, vocabulary=40)}, WORDS[:40], chain(Eagle3)),
    "mtp": ("mtp", {"mtp": MtpConfig(passes=LENGTH)}, None, chain(Mtp)),
    "peagle": ("peagle", {"peagle": PeagleConfig(depths=LENGTH, vocabulary=40)}, WORDS[:40], chain(Peagle)),
    "dflash": ("dflash", {"block": BLOCKS}, None, chain(DFlash)),
    "dspark": (
        "dspark",
        {"block": BLOCKS.model_copy(update={"size": LENGTH}), "dspark": DSparkConfig(rank=6)},
        None,
        chain(DSpark),
    ),
    "dflash2": (
        "dflash2",
        {"block": BLOCKS, "dflash2": DFlash2Config(rank=6, candidates=5, group=8)},
        None,
        chain(DFlash2),
    ),
    "medusa": ("medusa", {"medusa": MedusaConfig(heads=LENGTH)}, None, likeliest(Medusa)),
    "hydra": ("hydra", {"medusa": MedusaConfig(heads=LENGTH)}, None, likeliest(hydra_on)),
    "hydra++": ("hydra", {"medusa": MedusaConfig(heads=LENGTH, prefix=True)}, None, likeliest(hydra_on)),
}


def rows(count: int = 4) -> dict[str, torch.Tensor]:
    """Two documents and padding in each row, the beginning of each no label."""
    ids = torch.randint(0, VOCABULARY, (count, S), generator=torch.Generator().manual_seed(3))
    documents = torch.tensor([0] * 24 + [1] * 14 + [-1] * 2).expand_as(ids)
    positions = torch.tensor([*range(24), *range(14), 0, 1]).expand_as(ids)
    mask = (positions >= 3) & (documents >= 0)
    return {"input_ids": ids, "positions": positions, "documents": documents, "loss_mask": mask}


def made(name: str, target: Backbone, **more: Any) -> Any:
    """The objective of a case, its network shaken, so that what it says is neither the target's nor nothing."""
    method, sections, ids, _ = CASES[name]
    torch.manual_seed(1)
    rollouts = RolloutsConfig(**({"share": 0.5, "places": 5} | more.pop("rollouts", {})))
    own = {"data": DataConfig(sequence_length=S), "loop": LoopConfig(batch_rows=4, micro_rows=4)}
    goal = build(method, target.model, ids=ids, rollouts=rollouts, **(own | sections | more))
    shaken = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in goal.draft().parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=shaken))
    return goal


class Noted:
    """Keeps the places and the drafts of a forward pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: Any = None
        self.drafted: Any = None
        self.q_XJ: Any = None
        judged = OwnDrafts._judged

        def noted(goal: OwnDrafts, batch: Any, places: Places, draw: Any, states: Any) -> Drafted:
            self.places, self.q_XJ = places, draw.q_XJ
            self.drafted = judged(goal, batch, places, draw, states)
            return self.drafted

        monkeypatch.setattr(OwnDrafts, "_judged", noted)


def trained_on(goal: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    (rewritten,) = goal.rollouts.rewrite([batch], range(len(batch["input_ids"])), 0, 7)
    loss, terms = goal.module(rewritten, goal.prepare(rewritten))
    return loss, {"rows": drafted_for(rewritten), "uniforms": rewritten[UNIFORM], **terms}


def drafted_for(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The rows of a rewritten batch that have places."""
    return (batch[AT] >= 0).any(1).nonzero()[:, 0]
