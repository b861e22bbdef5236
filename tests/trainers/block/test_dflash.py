"""The loss of block drafters against a loop over every draft of every block, and what training does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.block.proposer import DFlash
from draftsmith.drafters.layers import sinks, spans
from draftsmith.errors import RequestError
from draftsmith.trainers.block.dflash import DFlashObjective
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.loop.sums import means
from draftsmith.trainers.losses.mix import Mix
from draftsmith.trainers.method_config import BlockConfig
from draftsmith.trainers.packed import passes
from helpers.models.method_objectives import build
from torch import Tensor

Batch = dict[str, Tensor]
MIXED: dict[str, Any] = {"kl": 0.0, "ce": 0.1, "tv": 0.9}
SMALL: dict[str, Any] = {"size": 4, "decoder_layers": 2, "anchors": 5, "decay": 0.7}


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def rows() -> Batch:
    """Packed rows: documents of 7 and 4 tokens and padding; one of 12 with a prompt of 4 and a gap."""
    documents = torch.tensor([[0] * 7 + [1] * 4 + [-1], [0] * 12])
    positions = torch.tensor([[*range(7), *range(4), 0], [*range(12)]])
    mask = (documents >= 0) & (positions > 0)
    mask[1, :4] = False
    mask[1, 8] = False
    g = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (2, 12), generator=g),
        "loss_mask": mask,
        "positions": positions,
        "documents": documents,
    }


def goal_for(target: Backbone, objective: dict[str, Any] | None = None, **block: Any) -> DFlashObjective:
    torch.manual_seed(0)
    config = BlockConfig(**(SMALL | block))
    return build("dflash", target.model, block=config, objective=ObjectiveConfig(chunk=4, **(objective or {})))


def own_weights(q: list[float], positions: str) -> list[float]:
    """Of a block's drafts that have a label: 0.7^j, or D-PACE's by its definition."""
    if positions == "geometric":
        return [0.7**j for j in range(len(q))]
    passed = [0.5 * each + 0.5 for each in q]
    alive = [float(torch.tensor(passed[: m + 1]).prod()) for m in range(len(q))]
    return [sum(alive[j:]) for j in range(len(q))]


def by_loops(
    goal: DFlashObjective, batch: Batch, mix: Mix, positions: str, *, weigh: str = "labels", ce_label: str = "text"
) -> Tensor:
    """One block at a time, a row's weighted mean times its labels; or the mean of all blocks, times all labels."""
    teacher, (head,) = goal.prepare(batch), goal.module._frozen
    at_RA, label_RAK, known_RAK = teacher.anchors
    out = goal.draft().blocks(teacher.fused_RSF, batch["positions"], batch["documents"], teacher.roots_RAH, at_RA)
    draft, p = out @ head.weight.T, teacher.hidden_RSH @ head.weight.T
    total, all_losses, all_weights = torch.zeros(()), [], []
    for row in range(len(at_RA)):
        losses, weights = [], []
        for block in range(at_RA.shape[1]):
            known = int(known_RAK[row, block].sum())
            places = label_RAK[row, block, :known]
            labels, logits = batch["input_ids"][row, places], draft[row, block, :known]
            q = logits.detach().softmax(-1)[range(known), labels].tolist()
            weights += own_weights(q, positions)
            labels = labels if ce_label == "text" else p[row, places - 1].argmax(-1)
            losses += list(mix(logits, p[row, places - 1], labels)["loss"])
        mean = sum(w * each for w, each in zip(weights, losses, strict=True)) / sum(weights)
        total = total + mean * batch["loss_mask"][row].sum()
        all_losses, all_weights = all_losses + losses, all_weights + weights
    if weigh == "labels":
        return total
    mean = sum(w * each for w, each in zip(all_weights, all_losses, strict=True)) / sum(all_weights)
    return mean * batch["loss_mask"].sum()


@pytest.mark.parametrize("positions", ["geometric", "d-pace"])
@pytest.mark.parametrize("layout", ["fill-in", "anchor-first"])
@pytest.mark.parametrize("terms", [{}, MIXED, {"kl": 0.0, "ce": 1.0}], ids=str)
def test_the_loss_is_that_of_a_loop(terms: dict[str, float], layout: str, positions: str, target: Backbone) -> None:
    goal = goal_for(target, {**terms, "positions": positions}, layout=layout)
    batch = rows()
    loss, reported = goal.module(batch, goal.prepare(batch))
    wanted = by_loops(goal, batch, Mix.of(ObjectiveConfig(**terms)), positions)
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(each, list(goal.draft().parameters())) for each in (loss, wanted))
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-4)
    depth = goal.draft().config.most
    assert {"loss", "alpha", "agreement", "ce", *(f"alpha_{j + 1}" for j in range(1, depth))} <= reported.keys()


@pytest.mark.parametrize("positions", ["geometric", "d-pace"])
@pytest.mark.parametrize(
    "own", [{"weigh": "blocks"}, {"ce_label": "target"}, {"weigh": "blocks", "ce_label": "target"}]
)
def test_what_other_trainers_weigh_and_call_a_label(own: dict[str, str], positions: str, target: Backbone) -> None:
    """DeepSpec's mean over all blocks, on rows of very uneven labels; speculators' label, the target's likeliest."""
    terms = {"kl": 0.0, "ce": 1.0, "positions": positions}
    goal, plain, batch = goal_for(target, terms, **own), goal_for(target, terms), rows()
    batch["loss_mask"][1, 7:] = False
    assert 2 * int(batch["loss_mask"][1].sum()) < int(batch["loss_mask"][0].sum())
    (loss, _), (other, _) = (each.module(batch, each.prepare(batch)) for each in (goal, plain))
    wanted = by_loops(goal, batch, Mix.of(ObjectiveConfig(kl=0.0, ce=1.0)), positions, **own)
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    assert abs(float(loss - other)) > 0.01
    ours, theirs = (torch.autograd.grad(each, list(goal.draft().parameters())) for each in (loss, wanted))
    for mine, each in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, each, rtol=1e-3, atol=1e-4)


def test_micro_batches_make_no_difference(target: Backbone) -> None:
    goal, batch = goal_for(target), rows()
    goal.begin_step(0, 11)
    whole, together = goal.module(batch, goal.prepare(batch))
    parts = [{name: each[row : row + 1] for name, each in batch.items()} for row in range(2)]
    made = [goal.module(part, goal.prepare(part)) for part in parts]
    torch.testing.assert_close(whole, sum(loss for loss, _ in made), rtol=1e-5, atol=1e-5)
    for name, term in together.items():
        torch.testing.assert_close(term, sum(terms[name] for _, terms in made), rtol=1e-5, atol=1e-5, msg=name)


def test_terms_are_means_over_the_drafts_of_a_place(target: Backbone) -> None:
    goal, batch = goal_for(target), rows()
    teacher, (head,) = goal.prepare(batch), goal.module._frozen
    _, terms = goal.module(batch, teacher)
    at_RA, label_RAK, known_RAK = teacher.anchors
    out = goal.draft().blocks(teacher.fused_RSF, batch["positions"], batch["documents"], teacher.roots_RAH, at_RA)
    q, p = (out @ head.weight.T).softmax(-1), (teacher.hidden_RSH @ head.weight.T).softmax(-1)
    for j, name in enumerate(("alpha", "alpha_2", "alpha_3")):
        row, block = known_RAK[..., j].nonzero(as_tuple=True)
        alpha = torch.minimum(q[row, block, j], p[row, label_RAK[row, block, j] - 1]).sum(-1)
        wanted = sum(alpha[row == r].mean() * batch["loss_mask"][r].sum() for r in range(2))
        torch.testing.assert_close(terms[name], wanted, rtol=1e-4, atol=1e-4)


def test_a_row_without_the_last_drafts_says_nothing_of_them(target: Backbone) -> None:
    """Its documents of three tokens have two drafts, and not a third that is always rejected."""
    goal, long = goal_for(target, anchors=9), rows()
    short = {
        "input_ids": long["input_ids"][:1],
        "documents": torch.arange(4).repeat_interleave(3)[None],
        "positions": torch.arange(3).repeat(4)[None],
        "loss_mask": (torch.arange(3) > 0).repeat(4)[None],
    }
    alone = {name: each[1:] for name, each in long.items()}
    both = {name: torch.cat((short[name], each)) for name, each in alone.items()}
    (_, of_one), (_, of_both) = (goal.module(batch, goal.prepare(batch)) for batch in (alone, both))
    of_one, of_both = (
        means({k: float(v) for k, v in terms.items()}, labels) for terms, labels in ((of_one, 7), (of_both, 15))
    )
    assert of_one["alpha_3"] > 0
    assert of_both["alpha_3"] == pytest.approx(of_one["alpha_3"], rel=1e-5)
    assert of_both["alpha"] != pytest.approx(of_one["alpha"], rel=1e-3)


def test_steps_draw_anew_and_held_out_rows_do_not(target: Backbone) -> None:
    goal, batch = goal_for(target, anchors=3), rows()
    goal.begin_step(0, 1)
    first = goal.prepare(batch).anchors.at_RA
    goal.begin_step(1, 2)
    assert not torch.equal(goal.prepare(batch).anchors.at_RA, first)
    goal.module.eval()
    held_out = goal.prepare(batch).anchors.at_RA
    goal.begin_step(2, 3)
    assert torch.equal(goal.prepare(batch).anchors.at_RA, held_out)


def test_rows_without_labels_teach_nothing(target: Backbone) -> None:
    goal, batch = goal_for(target, {"positions": "d-pace"}), rows()
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    loss, terms = goal.module(batch, goal.prepare(batch))
    loss.backward()
    assert (float(loss.detach()), terms) == (0.0, {})


@pytest.mark.parametrize("layout", ["fill-in", pytest.param("anchor-first", marks=pytest.mark.slow)])
def test_a_text_learnt_by_heart_is_drafted_whole(layout: str, target: Backbone) -> None:
    """tau goes to K + 1: labels, anchors, positions and decoding all speak of the same tokens."""
    prompts = [[5, 9, 2, 33, 7], [11], [1, 2, 3]]
    greedy: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 24}
    texts = [
        p + t for p in prompts for t in autoregressive(target, [p], **greedy | {"max_new_tokens": 32 - len(p)}).tokens
    ]
    batch = {
        "input_ids": torch.tensor(texts),
        "loss_mask": torch.ones(3, 32, dtype=torch.bool).index_fill(1, torch.tensor([0]), False),
        "positions": torch.arange(32).expand(3, -1),
        "documents": torch.zeros(3, 32, dtype=torch.long),
    }
    goal = goal_for(target, {"kl": 0.0, "ce": 1.0}, layout=layout, anchors=32)
    optimizer = torch.optim.AdamW(goal.module.parameters(), lr=5e-3)
    for step in range(60):
        goal.begin_step(step, step)
        goal.module(batch, goal.prepare(batch))[0].div(93).backward()
        optimizer.step()
        optimizer.zero_grad()
    net: Any = goal.draft()
    done = generate(target, DFlash(net.requires_grad_(False).eval(), target), prompts, **greedy)
    steps = -(-24 // (net.config.most + 1))
    assert done.target_calls <= steps + 2  # and one for the prompts


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a layer that is not there": ({"layers": (0, 1, 3)}, {}, r"block.layers is \[0, 1, 3\]; expected .* to 2"),
    "layers out of order": ({"layers": (1, 0)}, {}, "low to high"),
    "a mask that has no embedding": ({"mask_token": 61}, {}, "block.mask_token is 61; .* ids 0 to 60"),
    "nothing to learn": ({}, {"kl": 0.0}, "nothing would be learnt"),
    "one draft to pace": ({"size": 2}, {"positions": "d-pace"}, "learns one, by block.size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused(case: str, target: Backbone) -> None:
    block, objective, message = REFUSED[case]
    with pytest.raises(RequestError, match=message):
        goal_for(target, objective, **block)


@pytest.mark.parametrize("method", ["dflash", "dspark", "dflash2"])
def test_long_rows_have_the_numbers_of_a_mask(method: str, target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask of slots by states: loss, terms and gradients; computed again, the same bits."""
    batch, found = rows(), []
    monkeypatch.setattr(spans, "BLOCK", 8)
    for masked, recompute in ((12, False), (11, False), (11, True)):
        monkeypatch.setattr(passes, "MASKED", masked)
        torch.manual_seed(0)
        config = BlockConfig(**SMALL, recompute=recompute)
        goal = build(method, target.model, block=config, objective=ObjectiveConfig(chunk=4))
        loss, terms = goal.module(batch, goal.prepare(batch))
        loss.backward()
        gradients = {name: each.grad for name, each in goal.module.named_parameters() if each.grad is not None}
        found.append((loss.detach(), terms, gradients))
        monkeypatch.setattr(sinks, "seen", None)  # nothing asks for a mask
    assert len(found[0][2]) > 10
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], found[1], rtol=0, atol=0)
