"""Medusa's labels and loss against a brute-force version, learning in a few steps, exact resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.heads.medusa import Medusa
from draftsmith.drafters.projection import Projection
from draftsmith.errors import RequestError, Stopped
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.labels import has_label
from draftsmith.trainers.loop import setup, state
from draftsmith.trainers.loop.loop import RunOutcome
from draftsmith.trainers.loop.sums import COUNT
from draftsmith.trainers.medusa import MedusaObjective
from draftsmith.trainers.method_config import MedusaConfig
from helpers.models.learnable_text import Batch, Chains, descend, learnt, loop_on, stop_behind
from helpers.models.method_objectives import build

PAPER = ObjectiveConfig(kl=0, ce=1)
HEADS = 4


def nothing(_module: torch.nn.Module, _folder: Path) -> None:
    """Where an export goes that no test looks at."""


def hand_made() -> Batch:
    """Two packed rows: documents of 5, 2 and 4 tokens and padding; one of 12 with a prompt of 7."""
    documents = torch.tensor([[0] * 5 + [1] * 2 + [2] * 4 + [-1], [0] * 12])
    positions = torch.tensor([[*range(5), *range(2), *range(4), 0], [*range(12)]])
    g = torch.Generator().manual_seed(0)
    mask = (documents >= 0) & (positions > 0)
    mask[1, :7] = False
    mask[1, 9] = False  # a label that does not count in the middle of an answer
    return {
        "input_ids": torch.randint(0, VOCABULARY, (2, 12), generator=g),
        "loss_mask": mask,
        "positions": positions,
        "documents": documents,
    }


def brute_force(batch: Batch, k: int) -> list[tuple[int, int, int]]:
    """(row, position, label) of head k, looked for one by one."""
    found = []
    R, S = batch["input_ids"].shape
    for r in range(R):
        for t in range(S):
            at = t + k + 1
            if at < S and batch["loss_mask"][r, at]:
                between = {int(batch["documents"][r, each]) for each in range(t, at + 1)}
                if len(between) == 1 and -1 not in between:
                    found.append((r, t, int(batch["input_ids"][r, at])))
    return found


@pytest.mark.parametrize("k", range(1, 13))
def test_labels_stay_inside_documents_and_count(k: int) -> None:
    batch = hand_made()
    counts = has_label(batch, k + 1)
    labels = batch["input_ids"][:, k + 1 :][counts].tolist()
    ours = [(*place, label) for place, label in zip(counts.nonzero().tolist(), labels, strict=True)]
    assert ours == brute_force(batch, k)
    assert bool(ours) == (k < 11)


def test_labels_by_hand() -> None:
    """The first row: of the 5 tokens head 1 predicts the last three, of the 4 the last two."""
    at = has_label(hand_made(), 2)[0].nonzero()[:, 0].tolist()
    assert at == [0, 1, 2, 7, 8]
    assert has_label(hand_made(), 4)[0].nonzero()[:, 0].tolist() == [0]
    # behind the prompt of 7, without token 9: labels 7, 8, 10 and 11
    assert has_label(hand_made(), 2)[1].nonzero()[:, 0].tolist() == [5, 6, 8, 9]


def shaken(goal: MedusaObjective) -> MedusaObjective:
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in goal.draft().parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=g))
    return goal


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("objective", [PAPER, ObjectiveConfig(kl=0.7, ce=0.3, temperature=2.0)])
@pytest.mark.parametrize("chunk", [3, 256])
def test_the_loss_is_the_plain_formula(objective: ObjectiveConfig, shared: bool, chunk: int) -> None:
    """sum_k 0.8^k sum_t loss_k(t), every hidden state computed from its own document alone."""
    target = make_target("qwen3").model
    objective = objective.model_copy(update={"chunk": chunk})
    goal = shaken(build("medusa", target, medusa=MedusaConfig(shared_head=shared), objective=objective))
    batch = hand_made()
    loss, terms = goal.module(batch, goal.prepare(batch))

    head, heads = target.get_output_embeddings(), goal.draft()
    expected = torch.zeros(())
    for k in range(1, HEADS + 1):
        total, hits = torch.zeros(()), 0
        for r, t, label in (places := brute_force(batch, k)):
            first = t - int(batch["positions"][r, t])
            ids = batch["input_ids"][r, first : t + k + 1]
            states = target.get_decoder()(input_ids=ids[None]).last_hidden_state[0]
            logits = heads.logits(heads(states[t - first]), Projection(head.weight))[k - 1]
            p = (head(states[-1]) / objective.temperature).softmax(-1)
            log_q = (logits / objective.temperature).log_softmax(-1)
            total = total + objective.kl * (p * (p.log() - log_q)).sum()
            total = total + objective.ce * F.cross_entropy(logits, torch.tensor(label))
            hits += int(logits.argmax() == label)
        expected = expected + 0.8**k * total
        # the loop divides by all labels, and each head's own terms by those that it has
        torch.testing.assert_close(terms[f"head{k}_loss"], total.detach())
        assert float(terms[f"head{k}_top1"]) == hits
        assert float(terms[f"{COUNT}head{k}_top1"]) == float(terms[f"{COUNT}head{k}_loss"]) == len(places)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(terms["loss"], loss.detach())

    ours = torch.autograd.grad(loss, list(heads.parameters()))
    theirs = torch.autograd.grad(expected, list(heads.parameters()))
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("objective", [PAPER, ObjectiveConfig()])
def test_no_label_gives_zeros_of_the_same_names(objective: ObjectiveConfig) -> None:
    """Processes add their terms up by name: a batch without labels must not leave any out."""
    goal = build("medusa", make_target("qwen3").model, objective=objective)
    batch = hand_made()
    _, expected = goal.module(batch, goal.prepare(batch))
    for mask in (torch.zeros_like(batch["loss_mask"]), batch["positions"] == 1):
        empty = batch | {"loss_mask": mask}
        loss, terms = goal.module(empty, goal.prepare(empty))
        loss.backward()
        assert list(terms) == list(expected)
        assert all(float(value) == 0 for value in terms.values())
        assert all(p.grad is not None for p in goal.draft().parameters())


@pytest.mark.parametrize("objective", [PAPER, ObjectiveConfig()])
def test_mixed_and_half_precision(objective: ObjectiveConfig) -> None:
    """bf16 by autocast, as the loop does it, and heads that are bf16 themselves, as in DeepSpeed."""
    goal = shaken(build("medusa", make_target("qwen3").model, objective=objective))
    batch = hand_made()
    plain, _ = goal.module(batch, goal.prepare(batch))
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = goal.module(batch, goal.prepare(batch))
    goal.module.to(torch.bfloat16)
    half, _ = goal.module(batch, goal.prepare(batch))
    for each in (mixed, half):
        each.backward()
        torch.testing.assert_close(each.float(), plain, rtol=0.03, atol=0.1)


@pytest.mark.parametrize("shared", [False, True])
def test_the_heads_alone_are_trained_and_saved(shared: bool) -> None:
    target = make_target("qwen3").model
    goal = build("medusa", target, medusa=MedusaConfig(shared_head=shared), objective=PAPER)
    batch = hand_made()
    goal.module(batch, goal.prepare(batch))[0].backward()
    assert all(p.grad is None and not p.requires_grad for p in target.parameters())
    trained = {id(p) for p in goal.module.parameters()}
    assert trained == {id(p) for p in goal.draft().parameters()}
    assert all(p.grad is not None for p in goal.module.parameters())
    kept = state.trainable(goal.module)
    assert sum(t.numel() for t in kept.values()) == sum(p.numel() for p in goal.draft().parameters())


def test_nothing_to_learn_is_refused() -> None:
    with pytest.raises(RequestError, match="nothing would be learnt"):
        build("medusa", make_target("qwen3").model, objective=ObjectiveConfig(kl=0, ce=0))


# ---- learning --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Backbone:
    """A target that has learnt the chains."""
    return learnt(Chains(64, 1))


def measured(goal: MedusaObjective) -> dict[str, float]:
    held_out = Chains(32, 2).batch()
    with torch.no_grad():
        _, terms = goal.module(held_out, goal.prepare(held_out))
    labels = float(held_out["loss_mask"].sum())
    return {name: float(value) / labels for name, value in terms.items()}


@pytest.mark.parametrize("objective", [PAPER, ObjectiveConfig()], ids=["ce", "kl"])
def test_a_few_steps_teach_the_heads(small: Backbone, objective: ObjectiveConfig) -> None:
    goal = build("medusa", small.model, objective=objective)
    prompts = [row[:5].tolist() for row in Chains(8, 3).ids]
    how = {"warper": Warper(0.0), "max_new_tokens": 24}

    def calls() -> int:
        done = generate(small, Medusa(goal.draft(), small), prompts, **how)
        assert done.tokens == autoregressive(small, prompts, **how).tokens
        return done.target_calls

    before, calls_before = measured(goal), calls()
    descend(goal.module, goal.prepare, Chains(64, 1).batch(), steps=40, lr=5e-3)
    after, calls_after = measured(goal), calls()
    assert after["loss"] < 0.5 * before["loss"]
    assert before["head1_top1"] < 0.1
    assert after["head1_top1"] > 0.7
    assert all(after[f"head{k}_loss"] < before[f"head{k}_loss"] for k in range(1, HEADS + 1))
    assert all(after[f"head{k}_top1"] > 0.4 for k in range(1, HEADS + 1))
    assert calls_after < 0.7 * calls_before


def test_a_shared_head_learns_too(small: Backbone) -> None:
    goal = build("medusa", small.model, medusa=MedusaConfig(shared_head=True), objective=PAPER)
    before = measured(goal)
    descend(goal.module, goal.prepare, Chains(64, 1).batch(), steps=40, lr=5e-3)
    after = measured(goal)
    assert after["loss"] < 0.6 * before["loss"]
    assert after["head1_top1"] > before["head1_top1"] + 0.15


STEPS = 8


def train(
    out: Path, small: Backbone, *, stop_at: int | None = None, micro: int = 4, shared: bool = False, rows=Chains
) -> tuple[MedusaObjective, RunOutcome]:
    """A run through the real loop, cut by a signal behind `stop_at` steps."""

    def make() -> MedusaObjective:
        return build("medusa", small.model, save, medusa=MedusaConfig(heads=2, shared_head=shared), objective=PAPER)

    goal, loop = loop_on(out, make, rows, steps=STEPS, lr=3e-3, micro=micro, validate_every=4)
    stop_behind(loop, stop_at)
    return goal, loop.run(setup.resume_from(out, "auto"))


def save(module: torch.nn.Module, folder: Path) -> None:
    state.save_tensors(folder / "heads.safetensors", module.state_dict())


@pytest.mark.parametrize("shared", [False, True])
def test_a_cut_run_resumes_to_the_same_bits(tmp_path: Path, small: Backbone, shared: bool) -> None:
    whole, _ = train(tmp_path / "whole", small, shared=shared)
    expected = whole.draft().state_dict()
    with pytest.raises(Stopped, match=f"after step 4 of {STEPS}"):
        train(tmp_path / "cut", small, shared=shared, stop_at=4)
    resumed, _ = train(tmp_path / "cut", small, shared=shared)
    got = resumed.draft().state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "cut" / "drafter" / "heads.safetensors").is_file()


def test_accumulation_does_not_change_the_mathematics(tmp_path: Path, small: Backbone) -> None:
    uneven = partial(Chains, uneven=True)
    losses = [train(tmp_path / str(m), small, micro=m, rows=uneven)[1].validation_loss for m in (1, 2, 8)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
