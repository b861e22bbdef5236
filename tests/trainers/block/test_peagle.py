"""P-EAGLE's branches by their rules, and its loss against a loop over drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.layers import sinks, spans
from draftsmith.trainers.block.branches import sampled
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.loop.sums import means
from draftsmith.trainers.method_config import Eagle3Config, PeagleConfig
from draftsmith.trainers.packed import passes
from helpers.models.method_objectives import build
from hypothesis import given, settings
from hypothesis import strategies as st

WORDS = [word for word in range(VOCABULARY) if word % 3 != 1]


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def rows(lengths: tuple[int, ...] = (8, 12), seed: int = 0, gaps: bool = True) -> dict[str, torch.Tensor]:
    """Two rows of documents of these lengths; each document's first token is no label, and a few others."""
    g, S = torch.Generator().manual_seed(seed), sum(lengths)
    documents = torch.cat([torch.full((n,), k) for k, n in enumerate(lengths)]).expand(2, -1)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    mask = positions > 0
    if gaps:
        mask = mask & (torch.rand(2, S, generator=g) > 0.1)
    ids = torch.randint(0, VOCABULARY, (2, S), generator=g)
    return {"input_ids": ids, "loss_mask": mask, "positions": positions, "documents": documents}


def goal_for(target: Backbone, *, ce: float = 1.0, decoder_layers: int = 2, **objective: Any) -> Any:
    torch.manual_seed(0)
    config = PeagleConfig(layers=(0, 1, 2), depths=3, decoder_layers=decoder_layers, ce=ce, vocabulary=len(WORDS))
    return build("peagle", target.model, ids=WORDS, peagle=config, objective=ObjectiveConfig(chunk=5, **objective))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=4).filter(lambda n: sum(n) > 3),
    st.integers(2, 6),
    st.floats(0.1, 1.0),
    st.floats(0.0, 0.5),
    st.integers(0, 5),
)
def test_branches_are_nested_labelled_and_as_many_as_asked(
    lengths: list[int], depths: int, kept: float, least: float, seed: int
) -> None:
    batch = rows(tuple(lengths), seed)
    found = sampled(batch, depths, kept, least, seed)
    S = sum(lengths)
    assert len(found.known) == depths - 1

    def labelled(row: int, t: int, d: int) -> bool:
        at = t + 2 + d
        same = at < S and bool(batch["documents"][row, t] == batch["documents"][row, at])
        return same and bool(batch["loss_mask"][row, at])

    for row in range(2):
        before = {t for t in range(S) if labelled(row, t, 0)}
        total = len(before)
        for d, known in enumerate(found.known, 1):
            now = {int(t) for t in found.at_RA[row, : known.shape[1]][known[row]]}
            can = {t for t in before if labelled(row, t, d)}
            assert now <= can
            asked = torch.tensor(float(total)) * max(kept**d, least)
            assert len(now) == min(len(can), int(asked.ceil()))
            before = now
    again = sampled({name: each[1:] for name, each in batch.items()}, depths, kept, least, seed)
    for one, other in zip(found.known, again.known, strict=True):
        count = int(other[0].sum())
        assert int(one[1].sum()) == count
        assert set(found.at_RA[1, :count].tolist()) == set(again.at_RA[0, :count].tolist())


@pytest.mark.parametrize("positions", ["geometric", "d-pace"])
def test_the_loss_is_that_of_a_loop(positions: str, target: Backbone) -> None:
    """Total variation, draft by draft; what cannot be drafted has probability zero."""
    goal, batch = goal_for(target, ce=0.0, positions=positions, tv=1.0), rows()
    net, teacher = goal.draft(), goal.prepare(batch)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    loss, _ = goal.module(batch, teacher)
    head: Any = target.model.get_output_embeddings()
    p = head(teacher.hidden_RSH).softmax(-1)
    branches = teacher.branches
    outputs = net.drafts(
        net.fuse(teacher.fused_RSF),
        teacher.embeds_RSH,
        batch["positions"],
        batch["documents"],
        branches.at_RA,
        branches.counts,
    )
    wanted, deepest = torch.zeros(()), 0
    for row in range(2):
        for t in range(batch["input_ids"].shape[1] - 2):
            same = batch["documents"][row, t] == batch["documents"][row, t + 2]
            if not (same and batch["loss_mask"][row, t + 2]):
                continue
            places = [(outputs[0], t)]
            for out, known in zip(outputs[1:], branches.known, strict=True):
                at = [k for k in range(known.shape[1]) if known[row, k] and branches.at_RA[row, k] == t]
                places += [(out, at[0])] if at else []
            q = [net.head(out[row, k]).softmax(-1) for out, k in places]
            deepest = max(deepest, len(q))
            labels = [int(batch["input_ids"][row, t + 2 + d]) for d in range(len(q))]
            right = [each[WORDS.index(x)].item() if x in WORDS else 0.0 for each, x in zip(q, labels, strict=True)]
            alive = torch.tensor([0.5 * each + 0.5 for each in right]).cumprod(0)
            weights = alive.flip(0).cumsum(0).flip(0) if positions == "d-pace" else torch.ones(len(q))
            for d, each in enumerate(q):
                wide = torch.zeros(VOCABULARY).index_copy(0, torch.tensor(WORDS), each)
                wanted = wanted + weights[d] * (1 - torch.minimum(wide, p[row, t + 1 + d]).sum())
    assert deepest == 3
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    used = [each for each in net.parameters() if each.requires_grad]
    ours, theirs = (torch.autograd.grad(each, used) for each in (loss, wanted))
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-4)


def test_without_mask_pairs_the_loss_is_eagle_3s(target: Backbone) -> None:
    goal, batch = goal_for(target, decoder_layers=1), rows()
    config = Eagle3Config(layers=(0, 1, 2), passes=1, vocabulary=len(WORDS))
    plain = build("eagle3", target.model, ids=WORDS, eagle3=config, objective=ObjectiveConfig(chunk=5))
    own = {name: each for name, each in goal.draft().state_dict().items() if not name.startswith("mask_")}
    plain.draft().load_state_dict(own)
    teacher = goal.prepare(batch)
    none = teacher.branches._replace(known=())
    ours, terms = goal.module(batch, teacher._replace(branches=none))
    theirs, same = plain.module(batch, plain.prepare(batch))
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(terms["alpha"], same["alpha"], rtol=1e-6, atol=0)


def test_other_pairs_in_every_step_and_the_same_ones_when_held_out(target: Backbone) -> None:
    goal, batch = goal_for(target), rows(gaps=False)

    def anchors() -> list[int]:
        return goal.prepare(batch).branches.at_RA.tolist()

    goal.begin_step(1, 1)
    first = anchors()
    assert first == anchors()
    goal.begin_step(2, 2)
    assert first != anchors()
    goal.module.eval()
    held_out = anchors()
    goal.begin_step(3, 3)
    assert held_out == anchors()


def test_long_rows_have_the_numbers_of_a_mask(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of mask pairs by text: loss, terms and gradients."""
    goal, batch = goal_for(target), rows((8, 12, 23))
    monkeypatch.setattr(spans, "BLOCK", 16)
    teacher = goal.prepare(batch)
    found = []
    for masked in (43, 42):
        monkeypatch.setattr(passes, "MASKED", masked)
        goal.module.zero_grad()
        loss, terms = goal.module(batch, teacher)
        loss.backward()
        gradients = {name: each.grad.clone() for name, each in goal.module.named_parameters() if each.grad is not None}
        found.append((loss.detach(), terms, gradients))
        monkeypatch.setattr(sinks, "seen", None)  # nothing asks for a mask
    assert len(found[0][2]) > 10
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_a_vocabulary_without_what_the_target_says_is_compared_with_nothing(target: Backbone) -> None:
    """Of the draft's distribution there is an overlap; of the loss and its own cross-entropy nothing."""
    batch = rows((20,))  # one document, which the target reads as it stands
    with torch.no_grad():
        said = set(target.model(batch["input_ids"]).logits.argmax(-1).flatten().tolist())
    ids = [word for word in range(VOCABULARY) if word not in said][:2]
    config = PeagleConfig(layers=(0, 1, 2), depths=3, decoder_layers=1, vocabulary=2)
    for words, measured in ((ids, False), (sorted(said), True)):
        goal = build("peagle", target.model, ids=words, peagle=config, objective=ObjectiveConfig(chunk=5))
        _, terms = goal.module(batch, goal.prepare(batch))
        found = means({name: float(each) for name, each in terms.items()}, float(batch["loss_mask"].sum()))
        assert ({"loss", "ce"} <= found.keys()) is measured
        assert {"alpha", "agreement"} <= found.keys()
