"""BPD's loss against a brute-force version, the drawn head, the tuned target, exact resume."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.heads.bpd import Bpd
from draftsmith.errors import RequestError, Stopped
from draftsmith.trainers.bpd import BpdObjective, TunedBpdObjective
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.loop import setup, state
from draftsmith.trainers.loop.step import Steps
from draftsmith.trainers.loop.sums import COUNT
from draftsmith.trainers.method_config import BpdConfig, TuneConfig
from draftsmith.trainers.teacher.tuned import TunedTarget
from helpers.models.learnable_text import Batch, Chains, learnt, loop_on, stop_behind
from helpers.models.method_objectives import build
from torch import Tensor

GOLD, KL = ObjectiveConfig(kl=0, ce=1, chunk=512), ObjectiveConfig(kl=1, ce=0, chunk=5)
SIZES = BpdConfig(block=4, inner=8)
ALL = SIZES.model_copy(update={"every_head": True})
FULL = TuneConfig(how="full", head_lr_ratio=1)
LORA = TuneConfig(how="lora", rank=4, dropout=0.0, head_lr_ratio=1)


def nothing(_module: torch.nn.Module, _folder: Path) -> None:
    """Where an export goes that no test looks at."""


def hand_made() -> Batch:
    """Two packed rows: documents of 5, 2 and 4 tokens and padding; one of 12 with a prompt of 7."""
    documents = torch.tensor([[0] * 5 + [1] * 2 + [2] * 4 + [-1], [0] * 12])
    positions = torch.tensor([[*range(5), *range(2), *range(4), 0], [*range(12)]])
    mask = (documents >= 0) & (positions > 0)
    mask[1, :7] = False
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "loss_mask": mask, "positions": positions, "documents": documents}


def shaken(goal: BpdObjective) -> BpdObjective:
    """Outputs that differ from the target's own; adapters that do something."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in goal.module.named_parameters():
            if "medusa" in name or "lora_B" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=g))
    return goal


def frozen(sizes: BpdConfig, objective: ObjectiveConfig) -> BpdObjective:
    torch.manual_seed(0)
    return shaken(build("bpd", make_target("qwen3").model, bpd=sizes, objective=objective))


def tuned(sizes: BpdConfig, objective: ObjectiveConfig, tune: TuneConfig) -> tuple[TunedBpdObjective, TunedTarget]:
    torch.manual_seed(0)
    target = TunedTarget(make_target("qwen3"), tune, row_tokens=64, remember=tune.how == "full")
    goal = build("bpd", target, bpd=sizes, objective=objective)
    shaken(goal)
    return goal, target


def run(goal: BpdObjective, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return goal.module(batch, goal.prepare(batch))


def by_hand(goal: BpdObjective, target, original, batch: Batch, objective: ObjectiveConfig, k: int):  # noqa: ANN001, ANN201
    """Head k's loss, every position looked for one by one, each document run by itself."""
    head, total, count = target.get_output_embeddings(), torch.zeros(()), 0
    for r, t in torch.ones(2, 12).nonzero().tolist():
        at = t + k + 1
        if at >= 12 or batch["documents"][r, t] != batch["documents"][r, at]:
            continue
        if not batch["loss_mask"][r, at]:
            continue
        first, label = t - int(batch["positions"][r, t]), batch["input_ids"][r, at]
        ids = batch["input_ids"][r, first : t + k + 1][None]
        states = target.get_decoder()(input_ids=ids).last_hidden_state[0]
        here = states[t - first]
        layer = goal.draft()
        inner = torch.relu(layer.first.weight @ here + layer.first.bias)
        if k:
            here = here + (layer.second.weight @ inner + layer.second.bias).view(-1, 32)[k - 1]
        # the target's own output is held to the distribution that it had, the others foresee its present one
        teacher = original if k == 0 else target
        message = teacher.get_output_embeddings()(teacher.get_decoder()(input_ids=ids).last_hidden_state[0, -1])
        log_q, p = (head.weight @ here).log_softmax(-1), message.detach().softmax(-1)
        total = total + objective.kl * (p * (p.log() - log_q)).sum()
        total = total + objective.ce * F.nll_loss(log_q, label)
        count += 1
    return total, count


def assert_same_gradients(goal: BpdObjective, ours: Tensor, theirs: Tensor) -> None:
    names, moving = zip(*((n, p) for n, p in goal.module.named_parameters() if p.requires_grad), strict=True)
    left = torch.autograd.grad(ours, moving, retain_graph=True, allow_unused=True)
    right = torch.autograd.grad(theirs, moving, retain_graph=True, allow_unused=True)
    for name, mine, plain in zip(names, left, right, strict=True):
        assert mine is not None, f"{name} has no gradient: other processes would wait for it"
        plain = torch.zeros_like(mine) if plain is None else plain
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=2e-4, msg=name)


@pytest.mark.parametrize("objective", [GOLD, KL], ids=["ce", "kl"])
def test_the_loss_is_the_plain_mean(objective: ObjectiveConfig) -> None:
    goal, batch = frozen(ALL, objective), hand_made()
    loss, terms = run(goal, batch)
    found = [by_hand(goal, goal.features.target, goal.features.target, batch, objective, k) for k in (1, 2, 3)]
    expected = torch.stack([total for total, _ in found]).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(terms["loss"], loss.detach())
    for k, (total, count) in enumerate(found, 1):
        assert float(terms[f"head{k}_loss"]) == pytest.approx(total.item(), 1e-4)
        assert float(terms[f"{COUNT}head{k}_loss"]) == count
    assert_same_gradients(goal, loss, expected)


@pytest.mark.parametrize("objective", [GOLD, KL], ids=["ce", "kl"])
@pytest.mark.parametrize("tune", [FULL, LORA], ids=["full", "lora"])
def test_a_tuned_target_is_one_of_the_k(objective: ObjectiveConfig, tune: TuneConfig) -> None:
    """Gradients of target and layer; the target has moved already, and remembers what it was."""
    goal, target = tuned(ALL, objective, tune)
    original = make_target("qwen3").model
    if tune.how == "full":
        with torch.no_grad():
            for parameter in target.model.parameters():
                parameter.mul_(1.05)
    batch = hand_made()
    loss, terms = run(goal, batch)
    found = [by_hand(goal, target.model, original, batch, objective, k)[0] for k in range(4)]
    expected = torch.stack(found).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    assert float(terms["lm_loss"]) == pytest.approx(found[0].item(), 1e-4)
    assert_same_gradients(goal, loss, expected)
    for k in range(4):
        goal._student._drawn = k
        drawn, message = run(goal, batch)
        torch.testing.assert_close(drawn, found[k], rtol=1e-5, atol=1e-4)
        assert list(message) == ["loss"]
        assert_same_gradients(goal, drawn, found[k])


def test_the_mean_of_the_drawn_heads_is_the_loss_of_all() -> None:
    """Over all draws, each as likely as the others: loss and gradient."""
    goal, batch = frozen(SIZES, GOLD), hand_made()
    moving, losses, gradients = list(goal.draft().parameters()), [], []
    for k in (1, 2, 3):
        goal._student._drawn = k
        loss, terms = run(goal, batch)
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, moving))  # every parameter has one
        assert [name for name in terms if not name.startswith(COUNT)] == [f"head{k}_loss", f"head{k}_top1", "loss"]
    every = frozen(ALL, GOLD)
    expected, _ = run(every, batch)
    torch.testing.assert_close(torch.stack(losses).mean(), expected)
    for *each, plain in zip(*gradients, torch.autograd.grad(expected, list(every.draft().parameters())), strict=True):
        torch.testing.assert_close(torch.stack(each).mean(0), plain)
    # on held-out rows it is the mean over all heads that is measured, whatever was drawn
    goal.module.eval()
    measured, terms = run(goal, batch)
    torch.testing.assert_close(measured, expected)
    assert {"head1_loss", "head2_loss", "head3_top1"} < set(terms)


@pytest.mark.parametrize("first", [0, 1])
def test_every_head_is_drawn_as_often(first: int) -> None:
    goal = frozen(SIZES, GOLD)
    drawn = []
    for seed in range(4000):
        goal._student.draw(seed, first=first)
        drawn.append(goal._student.drawn)
    counts, share = Counter(drawn), 4000 / (4 - first)
    assert set(counts) == set(range(first, 4))
    # chi-square above 16.3 comes once in a thousand for 3 degrees of freedom
    assert sum((count - share) ** 2 / share for count in counts.values()) < 16.3


def test_a_step_draws_one_head_on_all_processes() -> None:
    """The number comes from seed and step alone, whereas other random numbers differ by process."""

    def begun(process: int, seed: int, step: int) -> tuple[int | None, float]:
        goal = frozen(SIZES, GOLD)
        loop = SimpleNamespace(
            objective=goal, accelerator=SimpleNamespace(process_index=process), loop=SimpleNamespace(seed=seed)
        )
        Steps.seed(loop, step)  # type: ignore[arg-type]
        return goal._student.drawn, float(torch.rand(()))

    drawn = [[begun(process, 0, step) for step in range(8)] for process in (0, 1)]
    assert [head for head, _ in drawn[0]] == [head for head, _ in drawn[1]]
    assert all(mine != theirs for (_, mine), (_, theirs) in zip(*drawn, strict=True))
    assert len({head for head, _ in drawn[0]}) == 3
    assert [begun(0, 1, step)[0] for step in range(8)] != [head for head, _ in drawn[0]]


def test_the_target_rests_and_is_not_drawn() -> None:
    goal, target = tuned(SIZES, GOLD, FULL.model_copy(update={"rest_steps": 200}))
    batch, drawn = hand_made(), set()
    for step in range(300):
        goal.begin_step(step, step)
        drawn.add((step < 200, goal._student.drawn))
        assert goal._joint.is_resting == (step < 200)
    assert drawn == {(True, k) for k in (1, 2, 3)} | {(False, k) for k in range(4)}
    goal.begin_step(0, 0)
    loss, _ = run(goal, batch)
    loss.backward()
    layers = target.model.get_decoder().layers.parameters()
    assert all(p.grad is not None and not p.grad.any() for p in layers)


def test_the_layer_alone_is_trained_on_a_frozen_target() -> None:
    target = make_target("qwen3").model
    goal, batch = build("bpd", target, bpd=SIZES, objective=GOLD), hand_made()
    run(goal, batch)[0].backward()
    assert all(p.grad is None and not p.requires_grad for p in target.parameters())
    assert {id(p) for p in goal.module.parameters()} == {id(p) for p in goal.draft().parameters()}
    for mask in (torch.zeros_like(batch["loss_mask"]), batch["positions"] == 1):
        empty = batch | {"loss_mask": mask}
        goal.module.zero_grad()
        loss, terms = run(goal, empty)
        loss.backward()
        assert loss.item() == 0
        assert "loss" in terms
        assert all(p.grad is not None and not p.grad.any() for p in goal.module.parameters())
    with pytest.raises(RequestError, match="nothing would be learnt"):
        build("bpd", target, bpd=SIZES, objective=ObjectiveConfig(kl=0, ce=0))
    with pytest.raises(RequestError, match="d-pace"):
        build("bpd", target, bpd=SIZES, objective=ObjectiveConfig(positions="d-pace"))


rows = partial(Chains, kept=1.0)


def train(
    out: Path,
    goal: BpdObjective,
    *,
    steps: int = 8,
    lr: float = 3e-3,
    micro: int = 4,
    stop_at: int | None = None,
    uneven: bool = False,
) -> BpdObjective:
    """A run through the real loop, cut by a signal behind `stop_at` steps."""
    _, loop = loop_on(out, lambda: goal, partial(rows, uneven=uneven), steps=steps, lr=lr, micro=micro)
    stop_behind(loop, stop_at)
    loop.run(setup.resume_from(out, "auto"))
    return goal


def save(module: torch.nn.Module, folder: Path) -> None:
    state.save_tensors(folder / "layer.safetensors", module.state_dict())


def fresh(tune: TuneConfig | None, objective: ObjectiveConfig = GOLD, *, steps: int = 5) -> BpdObjective:
    backbone = learnt(rows(64, 1), steps)
    torch.manual_seed(1)
    if tune is None:
        return build("bpd", backbone.model, save, bpd=SIZES, objective=objective)
    remembers = objective is KL
    return build(
        "bpd", TunedTarget(backbone, tune, row_tokens=64, remember=remembers), save, bpd=SIZES, objective=objective
    )


REGIMES = [(None, GOLD), (FULL, KL), (LORA.model_copy(update={"dropout": 0.2, "rest_steps": 3}), GOLD)]


@pytest.mark.parametrize(("tune", "objective"), REGIMES, ids=["frozen", "full", "lora"])
def test_a_cut_run_resumes_to_the_same_bits(
    tmp_path: Path, tune: TuneConfig | None, objective: ObjectiveConfig
) -> None:
    expected = state.trainable(train(tmp_path / "whole", fresh(tune, objective)).module)
    with pytest.raises(Stopped, match="after step 4 of 8"):
        train(tmp_path / "cut", fresh(tune, objective), stop_at=4)
    got = state.trainable(train(tmp_path / "cut", fresh(tune, objective)).module)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "cut" / "drafter" / "layer.safetensors").is_file()


@pytest.mark.parametrize("tune", [None, FULL], ids=["frozen", "full"])
def test_accumulation_does_not_change_the_mathematics(tmp_path: Path, tune: TuneConfig | None) -> None:
    """The head that a step has drawn is that of all its micro-batches."""
    one, two = (
        state.trainable(train(tmp_path / str(m), fresh(tune), micro=m, uneven=True, lr=3e-4).module) for m in (2, 8)
    )
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-3, atol=1e-5)


def descend(goal: BpdObjective, steps: int) -> None:
    """One drawn head per step, as the loop does it, without what a run writes."""
    groups: dict[float, list] = {1e-2: [], 3e-3: []}  # the target learns more slowly
    for name, parameter in goal.module.named_parameters():
        groups[1e-2 if "medusa" in name else 3e-3].append(parameter)
    optimizers = {lr: torch.optim.AdamW(each, lr=lr) for lr, each in groups.items() if each}
    batch = rows(64, 1).batch()
    labels = batch["loss_mask"].sum()
    for step in range(steps):
        goal.begin_step(step, step)
        goal.module.zero_grad()
        (run(goal, batch)[0] / labels).backward()
        for lr, optimizer in optimizers.items():
            if lr == 1e-2 or not goal._joint.is_resting:
                optimizer.step()


@torch.no_grad()
def measured(goal: BpdObjective) -> dict[str, float]:
    """Mean terms per label on held-out rows."""
    held_out = rows(32, 2).batch()
    goal.module.eval()
    _, terms = run(goal, held_out)
    goal.module.train()
    return {name: float(term) / float(held_out["loss_mask"].sum()) for name, term in terms.items()}


@pytest.mark.parametrize("tune", [None, FULL.model_copy(update={"rest_steps": 30})], ids=["frozen", "tuned"])
def test_a_few_steps_teach_whole_blocks(tune: TuneConfig | None) -> None:
    """A tuned target rests until the layer knows something, or it would learn to say later tokens."""
    prompts = [row[:5].tolist() for row in rows(8, 3).ids]
    goal, how = fresh(tune, steps=8), {"warper": Warper(0.0), "max_new_tokens": 24}

    def tokens_per_call() -> float:
        target = Backbone(goal.module.target if tune else goal.features.target, name="learner")
        done = generate(target, Bpd(goal.draft(), target), prompts, **how)
        assert done.tokens == autoregressive(target, prompts, **how).tokens
        return done.steps.kept_TB[done.steps.running_TB].mean()

    before = measured(goal)
    assert tokens_per_call() < 1.5
    descend(goal, 90)
    after = measured(goal)
    assert tokens_per_call() > 3
    assert after["loss"] < 0.2 * before["loss"]
    assert all(after[f"head{k}_top1"] > 0.7 for k in (1, 2, 3))
    if tune is not None:  # its own loss is among the k: it stays a language model
        assert after["lm_loss"] < before["lm_loss"]
