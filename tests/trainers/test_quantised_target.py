"""Heads, EAGLE-3 and a draft learn from a target of fewer bits, whose own weights nothing moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.features.model_hash import weights_hash
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.errors import RequestError
from draftsmith.trainers.config import ModelConfig, ObjectiveConfig
from draftsmith.trainers.method_config import Eagle3Config, MedusaConfig
from helpers.models.method_objectives import build

OBJECTIVE = ObjectiveConfig(kl=1.0, ce=0.0, chunk=8)
DRAFT = ModelConfig(layers=1, hidden=32, heads=4, kv_heads=2, head_size=16)
METHODS: dict[str, dict[str, Any]] = {
    "medusa": {"medusa": MedusaConfig(heads=2), "objective": OBJECTIVE},
    "eagle3": {"eagle3": Eagle3Config(layers=(0, 1, 2), passes=2)},
    "distill": {"model": DRAFT, "objective": OBJECTIVE},
}


@pytest.fixture(scope="module", params=["int8", "int4"])
def target(request: pytest.FixtureRequest, served_folder: Path) -> Backbone:
    return load_target(str(served_folder), quantization=request.param)


def row(vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (2, 16), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(16).expand(2, -1)
    mask = positions > 0
    return {"input_ids": ids, "loss_mask": mask, "positions": positions, "documents": torch.zeros_like(positions)}


@pytest.mark.parametrize("method", METHODS)
def test_a_few_steps(method: str, target: Backbone) -> None:
    torch.manual_seed(0)
    before = weights_hash(target.model)
    given: dict[str, Any] = {"tokenizer": target.tokenizer} if method == "distill" else {}
    given |= {"ids": range(target.vocabulary)} if method == "eagle3" else {}
    goal = build(method, target.model, **given, **METHODS[method])
    batch = row(target.vocabulary)
    moving = [each for each in goal.module.parameters() if each.requires_grad]
    optimiser = torch.optim.AdamW(moving, lr=1e-2)
    losses = []
    for _ in range(8):
        loss, _ = goal.module(batch, goal.prepare(batch))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
    assert weights_hash(target.model) == before


def test_what_moves_or_copies_the_target_is_refused(target: Backbone) -> None:
    with pytest.raises(RequestError, match="quantised"):
        build("medusa2", target.model, medusa=MedusaConfig(heads=2))
    with pytest.raises(RequestError, match="quantised"):
        build("distill", target.model, tokenizer=target.tokenizer, model=ModelConfig(start_from="target"))
