"""Hydra's inputs and loss against a brute-force version; true tokens in front make heads better."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.heads.hydra import Hydra
from draftsmith.errors import RequestError
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.labels import label_places
from draftsmith.trainers.loop.objective import Objective
from draftsmith.trainers.loop.sums import means
from draftsmith.trainers.method_config import MedusaConfig
from helpers.models.learnable_text import Batch, Chains, descend, learnt
from helpers.models.method_objectives import build

PAPER = ObjectiveConfig(kl=0, ce=1)


def nothing(_module: torch.nn.Module, _folder: object) -> None:
    """Where an export goes that no test looks at."""


def hand_made() -> Batch:
    """Two packed rows: documents of 5, 2 and 4 tokens and padding; one of 12 with a prompt of 7."""
    documents = torch.tensor([[0] * 5 + [1] * 2 + [2] * 4 + [-1], [0] * 12])
    positions = torch.tensor([[*range(5), *range(2), *range(4), 0], [*range(12)]])
    mask = (documents >= 0) & (positions > 0)
    mask[1, :7] = False
    g = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (2, 12), generator=g),
        "loss_mask": mask,
        "positions": positions,
        "documents": documents,
    }


@pytest.mark.parametrize(
    ("shared", "prefix", "published"),
    [(False, False, False), (True, False, False), (False, True, False), (False, True, True)],
)
@pytest.mark.parametrize(
    "objective", [PAPER.model_copy(update={"chunk": 3}), ObjectiveConfig(kl=0.7, ce=0.3, temperature=2.0, chunk=64)]
)
def test_the_loss_is_the_plain_formula(
    objective: ObjectiveConfig, shared: bool, prefix: bool, published: bool
) -> None:
    """Head k reads h_t and E(x_{t+1}) to E(x_{t+k}), t and t+k+1 being in one document.

    With a layer in front it reads the layer's output there, which saw the document up to t.
    """
    target = make_target("qwen3").model
    config = MedusaConfig(heads=3, layers=2, decay=0.9, shared_head=shared, prefix=prefix, as_published=published)
    goal = build("hydra", target, medusa=config, objective=objective)
    heads, head = goal.draft(), target.get_output_embeddings()
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=g))
    batch = hand_made()
    loss, _ = goal.module(batch, goal.prepare(batch))

    expected = torch.zeros(())
    for r, t in torch.ones(2, 12).nonzero().tolist():
        for k in (1, 2, 3):
            at = t + k + 1
            if at >= 12 or batch["documents"][r, t] != batch["documents"][r, at]:
                continue
            if not batch["loss_mask"][r, at]:
                continue
            first = t - int(batch["positions"][r, t])
            ids = batch["input_ids"][r, first : t + k + 1]
            states = target.get_decoder()(input_ids=ids[None]).last_hidden_state[0]
            embeds = target.get_input_embeddings()(batch["input_ids"][r, t + 1 : t + k + 1])
            read = states[t - first]
            if prefix:
                before = states[None, : t - first + 1]
                read = heads.prefix(before, torch.arange(t - first + 1)[None], None)[0, -1]
            given = torch.cat([read, *embeds])
            own = head if shared else heads.lm_heads[k - 1]
            logits = own.weight @ heads.blocks[k - 1](given) + (own.bias if published else 0)
            p = (head(states[-1]) / objective.temperature).softmax(-1)
            log_q = (logits / objective.temperature).log_softmax(-1)
            kl = (p * (p.log() - log_q)).sum()
            ce = F.cross_entropy(logits, batch["input_ids"][r, at])
            expected = expected + 0.9**k * (objective.kl * kl + objective.ce * ce)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    ours = torch.autograd.grad(loss, list(heads.parameters()))
    theirs = torch.autograd.grad(expected, list(heads.parameters()))
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_rows_shorter_than_a_head_reaches(length: int, prefix: bool) -> None:
    config = MedusaConfig(prefix=prefix)
    goal = build("hydra", make_target("qwen3").model, medusa=config, objective=PAPER)
    batch = {name: tensor[:, -length:] for name, tensor in hand_made().items()}
    loss, terms = goal.module(batch, goal.prepare(batch))
    loss.backward()
    assert torch.isfinite(loss)
    assert [name for name in terms if name.startswith("head") and name.endswith("top1")] == [
        f"head{k}_top1" for k in range(1, 5)
    ]
    told = means({name: float(each) for name, each in terms.items()}, float(batch["loss_mask"].sum()))
    assert {name for name in told if name.endswith("top1")} == {
        f"head{k}_top1" for k in range(1, 5) if len(label_places(batch, k + 1)[0])
    }
    assert all(p.grad is not None for p in goal.draft().parameters())


def test_the_target_stays_as_it_is() -> None:
    target = make_target("qwen3").model
    goal = build("hydra", target, medusa=MedusaConfig(shared_head=True))
    batch = hand_made()
    goal.module(batch, goal.prepare(batch))[0].backward()
    assert all(p.grad is None and not p.requires_grad for p in target.parameters())
    assert {id(p) for p in goal.module.parameters()} == {id(p) for p in goal.draft().parameters()}
    with pytest.raises(RequestError, match="nothing would be learnt"):
        build("hydra", target, objective=ObjectiveConfig(kl=0, ce=0))
    with pytest.raises(RequestError, match=r"medusa\.prefix is on.*method `hydra`"):
        build("medusa", target, medusa=MedusaConfig(prefix=True), objective=PAPER)


rows = partial(Chains, kept=0.8)


@pytest.fixture(scope="module")
def small() -> Backbone:
    """A target that has learnt the chains."""
    return learnt(rows(64, 1))


def measured(goal: Objective) -> dict[str, float]:
    held_out = rows(32, 2).batch()
    with torch.no_grad():
        _, terms = goal.module(held_out, goal.prepare(held_out))
    return {name: float(value) / float(held_out["loss_mask"].sum()) for name, value in terms.items()}


@pytest.mark.slow
def test_heads_that_see_the_tokens_before_learn_more(small: Backbone) -> None:
    """Where a token was a surprise, Medusa's heads go on from what should have stood there."""
    found = {}
    for method in ("medusa", "hydra"):
        goal = build(method, small.model, medusa=MedusaConfig(decay=1.0), objective=PAPER)
        before = measured(goal)
        descend(goal.module, goal.prepare, rows(64, 1).batch(), steps=60, lr=5e-3)
        found[method] = measured(goal)
        assert found[method]["loss"] < 0.6 * before["loss"]
    gains = [found["hydra"][f"head{k}_top1"] - found["medusa"][f"head{k}_top1"] for k in range(1, 5)]
    assert gains == sorted(gains)  # the further ahead, the more there is to be surprised by
    assert min(gains[1:]) > 0.04
    assert gains[-1] > 0.1
    prompts = [row[:5].tolist() for row in rows(8, 3).ids]
    how = {"warper": Warper(0.0), "max_new_tokens": 24}
    done = generate(small, Hydra(goal.draft(), small), prompts, **how)
    assert done.tokens == autoregressive(small, prompts, **how).tokens
    fresh = build("hydra", small.model, objective=PAPER)
    before_calls = generate(small, Hydra(fresh.draft(), small), prompts, **how).target_calls
    assert done.target_calls < 0.7 * before_calls
