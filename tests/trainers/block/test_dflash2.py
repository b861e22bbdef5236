"""DFlash 2's loss against a loop, and that its selector learns what follows what among a slot's candidates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.errors import RequestError
from draftsmith.trainers.block.dflash2 import DFlash2Objective
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.losses.candidates import likeliest, logits_of
from draftsmith.trainers.losses.mix import Mix
from draftsmith.trainers.method_config import BlockConfig, DFlash2Config
from helpers.models.method_objectives import build


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


def goal_for(target: Backbone, **objective: Any) -> DFlash2Objective:
    torch.manual_seed(0)
    block = BlockConfig(size=4, decoder_layers=1, anchors=6, decay=0.7)
    own = DFlash2Config(rank=4, candidates=20, weight=0.6, group=8)
    goal = build("dflash2", target.model, block=block, dflash2=own, objective=ObjectiveConfig(chunk=4, **objective))
    with torch.no_grad():  # they begin as nothing
        for name, parameter in goal.draft().named_parameters():
            if "conv" in name or "codebook" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return goal


@pytest.mark.parametrize("positions", ["geometric", "d-pace"])
def test_the_loss_is_that_of_a_loop(positions: str, target: Backbone) -> None:
    goal, batch = goal_for(target, positions=positions), rows()
    teacher, (head,) = goal.prepare(batch), goal.module._frozen
    loss, reported = goal.module(batch, teacher)
    net, mix = goal.draft(), Mix.of(ObjectiveConfig())
    selector = net.candidate_selector
    at_RA, label_RAK, known_RAK = teacher.anchors
    out = net.blocks(teacher.fused_RSF, batch["positions"], batch["documents"], teacher.roots_RAH, at_RA)
    p = teacher.hidden_RSH @ head.weight.T
    wanted, recall = torch.zeros(()), 0.0
    for row in range(2):
        losses, weights, found, first = [], [], 0, 0
        for block in range(at_RA.shape[1]):
            known = int(known_RAK[row, block].sum())
            q = []
            for k in range(known):
                place = int(label_RAK[row, block, k])
                label, in_front = batch["input_ids"][row, place], batch["input_ids"][row, place - 1]
                slot = out[row, block, k]
                logits = slot @ head.weight.T
                one = mix(logits[None], p[row, place - 1][None], label[None])["loss"][0]
                best = logits.topk(20).indices
                score = logits[best] + selector(in_front, slot, best)
                if label in best:
                    one = one - 0.6 * score.log_softmax(-1)[best.tolist().index(int(label))]
                    found += k == 0
                first += k == 0
                losses.append(one)
                q.append(logits.detach().softmax(-1)[label])
            alive = (0.5 * torch.stack(q) + 0.5).cumprod(0) if q else torch.zeros(0)
            paced = alive.flip(0).cumsum(0).flip(0)
            weights += paced.tolist() if positions == "d-pace" else [0.7**j for j in range(known)]
        mean = sum(w * one for w, one in zip(weights, losses, strict=True)) / sum(weights)
        wanted = wanted + mean * batch["loss_mask"][row].sum()
        recall += found / first * int(batch["loss_mask"][row].sum())
        assert 0 < found < first
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    assert float(reported["candidate_recall"]) == pytest.approx(recall, rel=1e-4)
    ours, theirs = (torch.autograd.grad(each, list(net.parameters())) for each in (loss, wanted))
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-4)


def test_the_selector_learns_what_follows_what(target: Backbone) -> None:
    """Slots that say the same of every token, and a text in which each has one successor: the selector alone knows."""
    goal = goal_for(target, kl=0.0, ce=1.0)
    net, g = goal.draft(), torch.Generator().manual_seed(1)
    successor = torch.randperm(VOCABULARY, generator=g)
    text = [torch.arange(8)]
    for _ in range(23):
        text.append(successor[text[-1]])
    batch = {name: each[:1].expand(8, -1) for name, each in rows(24).items()} | {"input_ids": torch.stack(text, 1)}
    net.requires_grad_(False)
    selector = net.candidate_selector.requires_grad_(True)
    optimizer = torch.optim.AdamW(selector.parameters(), lr=0.05)
    said = []
    for step in range(60):
        goal.begin_step(step, step)
        loss, terms = goal.module(batch, goal.prepare(batch))
        loss.div(batch["loss_mask"].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(float(terms["selector"] / terms["candidate_recall"]))
    assert sum(said[-5:]) < 0.3 * sum(said[:5]), said


def test_rows_of_the_projection_give_the_logits_of_all(target: Backbone) -> None:
    goal = goal_for(target)
    (head,) = goal.module._frozen
    hidden = torch.randn(7, head.weight.shape[1], requires_grad=True)
    best = likeliest(hidden, head.projection, 5, 3)
    wanted = head.projection.logits(hidden)
    assert torch.equal(best, wanted.topk(5).indices)
    made = logits_of(hidden, head.projection, best, 3)
    torch.testing.assert_close(made, wanted.gather(1, best), rtol=1e-5, atol=1e-5)
    one, other = (
        torch.autograd.grad(each.square().sum(), hidden, retain_graph=True)[0]
        for each in (made, wanted.gather(1, best))
    )
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("own", "message"), [({"group": 7}, "dflash2.group is 7"), ({"candidates": 500}, "lower it")])
def test_sizes_that_do_not_fit_the_target_are_refused(own: dict[str, int], message: str, target: Backbone) -> None:
    with pytest.raises(RequestError, match=message):
        build("dflash2", target.model, block=BlockConfig(size=4), dflash2=DFlash2Config(**own))
