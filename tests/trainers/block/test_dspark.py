"""DSpark's loss against a loop, and that its head learns what follows what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.trainers.block.dspark import DSparkObjective
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.losses.mix import Mix
from draftsmith.trainers.method_config import BlockConfig, DSparkConfig
from helpers.models.method_objectives import build

MIXED: dict[str, Any] = {"kl": 0.0, "ce": 0.1, "tv": 0.9}


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def rows(length: int = 12) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (2, length), generator=g),
        "loss_mask": torch.ones(2, length, dtype=torch.bool).index_fill(1, torch.tensor([0]), False),
        "positions": torch.arange(length).expand(2, -1),
        "documents": torch.zeros(2, length, dtype=torch.long),
    }


def goal_for(target: Backbone, confidence: float = 0.0, **objective: Any) -> DSparkObjective:
    torch.manual_seed(0)
    block = BlockConfig(size=3, decoder_layers=1, anchors=6, decay=0.7)
    head = DSparkConfig(rank=4, confidence=confidence)
    goal = build("dspark", target.model, block=block, dspark=head, objective=ObjectiveConfig(chunk=4, **objective))
    with torch.no_grad():  # it begins at zero, where nothing of it would be seen
        goal.draft().markov_head.markov_w2.weight.normal_(std=0.5)
    return goal


@pytest.mark.parametrize("terms", [{}, MIXED], ids=str)
@pytest.mark.parametrize("positions", ["geometric", "d-pace"])
@pytest.mark.parametrize("sure", [0.0, 0.6])
def test_the_loss_is_that_of_a_loop(terms: dict[str, float], positions: str, sure: float, target: Backbone) -> None:
    goal, batch = goal_for(target, confidence=sure, positions=positions, **terms), rows()
    teacher, (head,) = goal.prepare(batch), goal.module._frozen
    loss, reported = goal.module(batch, teacher)
    assert ("confidence" in reported) == (sure > 0)
    assert "overlap" not in reported
    net, mix = goal.draft(), Mix.of(ObjectiveConfig(**terms))
    at_RA, label_RAK, known_RAK = teacher.anchors
    out = net.blocks(teacher.fused_RSF, batch["positions"], batch["documents"], teacher.roots_RAH, at_RA)
    p = teacher.hidden_RSH @ head.weight.T
    wanted = torch.zeros(())
    for row in range(2):
        losses, weights = [], []
        for block in range(at_RA.shape[1]):
            known = int(known_RAK[row, block].sum())
            places = label_RAK[row, block, :known]
            in_front = batch["input_ids"][row, places - 1]
            logits = out[row, block, :known] @ head.weight.T + net.markov_head(in_front)
            labels = batch["input_ids"][row, places]
            each = mix(logits, p[row, places - 1], labels)["loss"]
            if sure:
                kept = torch.minimum(logits.softmax(-1), p[row, places - 1].softmax(-1)).sum(-1).detach()
                said = net.confidence(out[row, block, :known], in_front)
                each = each + sure * F.binary_cross_entropy_with_logits(said, kept, reduction="none")
            losses += list(each)
            q = logits.detach().softmax(-1)[range(known), labels]
            alive = (0.5 * q + 0.5).cumprod(0)
            paced = alive.flip(0).cumsum(0).flip(0)
            weights += paced.tolist() if positions == "d-pace" else [0.7**j for j in range(known)]
        mean = sum(w * one for w, one in zip(weights, losses, strict=True)) / sum(weights)
        wanted = wanted + mean * batch["loss_mask"][row].sum()
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(each, list(net.parameters())) for each in (loss, wanted))
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-4)


def test_the_head_learns_what_follows_what(target: Backbone) -> None:
    """Of slots that say nothing: a text in which each token has one successor is foretold by the head alone."""
    goal = goal_for(target, kl=0.0, ce=1.0)
    net, g = goal.draft(), torch.Generator().manual_seed(1)
    successor = torch.randperm(VOCABULARY, generator=g)
    text = [torch.arange(8)]
    for _ in range(23):
        text.append(successor[text[-1]])
    batch = rows(24)
    batch = {name: each[:1].expand(8, -1) for name, each in batch.items()} | {"input_ids": torch.stack(text, 1)}
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("markov" in name)
    with torch.no_grad():
        net.norm.weight.zero_()
    optimizer = torch.optim.AdamW(net.markov_head.parameters(), lr=0.1)
    for step in range(60):
        goal.begin_step(step, step)
        goal.module(batch, goal.prepare(batch))[0].div(batch["loss_mask"].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    known = batch["input_ids"][:, :-1].unique()
    assert torch.equal(net.markov_head(known).argmax(-1), successor[known])
