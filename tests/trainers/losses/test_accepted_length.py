"""The expected accepted length as the objective, along the text and of the drafter's own drafts: its value by
enumeration, its gradient by finite differences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from math import prod
from typing import Any, Literal

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.errors import RequestError
from draftsmith.launch.check.models import check_recipe
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.losses.chunked import ChunkedLoss, Teacher
from draftsmith.trainers.losses.mix import Mix, OfTarget, Passed, drafted
from draftsmith.trainers.losses.pace import DraftPace, length_gain, reached
from draftsmith.trainers.method_config import (
    BlockConfig,
    DFlash2Config,
    DSparkConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    MtpConfig,
    PeagleConfig,
)
from draftsmith.trainers.student.distillation import as_chains
from helpers.models.method_objectives import build
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

LENGTH = {"kl": 0.0, "tv": 1.0, "positions": "accepted"}


def expected_length(alpha_AJ: Tensor, known_AJ: Tensor, kept_AJ: Tensor | None = None) -> Tensor:
    """sum_m alpha_m prod_{i < m} kept_i of every draft, what is not known left out; `kept`: alpha, unless given. [A]."""
    total = torch.zeros_like(alpha_AJ[:, 0])
    kept_AJ = alpha_AJ if kept_AJ is None else kept_AJ
    for row, (alphas, kept, known) in enumerate(zip(alpha_AJ, kept_AJ, known_AJ.tolist(), strict=True)):
        places = [j for j, there in enumerate(known) if there]
        for last, place in enumerate(places):
            total[row] = total[row] + alphas[place] * kept[places[:last]].prod()
    return total


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10_000), st.sampled_from([0.5, 0.9, 1.0]))
def test_the_weights_are_the_gradient_of_the_length(A: int, J: int, seed: int, share: float) -> None:
    """Alphas of 0 and 1 among them."""
    g = torch.Generator().manual_seed(seed)
    known = torch.rand(A, J, generator=g) < share
    alpha = (1.4 * torch.rand(A, J, generator=g, dtype=torch.float64) - 0.2).clamp(0, 1).requires_grad_()
    (wanted,) = torch.autograd.grad(expected_length(alpha, known).sum() + 0 * alpha.sum(), alpha)
    ours = length_gain(alpha, known, 0.0)
    assert not ours.requires_grad
    torch.testing.assert_close(ours, wanted)


def test_by_hand() -> None:
    """Alphas 0.5, 0 and 0.8: E = 0.5 + 0 + 0; one more of the second opens 0.5 * 1.8."""
    alpha, known = torch.tensor([[0.5, 0.0, 0.8]]), torch.ones(1, 3, dtype=torch.bool)
    assert length_gain(alpha, known, 0.0)[0].tolist() == pytest.approx([1.0, 0.9, 0.0])
    # with a floor of a half they are 0.75, 0.5 and 0.9
    assert length_gain(alpha, known, 0.5)[0].tolist() == pytest.approx([1 + 0.5 * 1.9, 0.75 * 1.9, 0.75 * 0.5])


def test_the_length_is_what_decoding_accepts_and_its_gradient_goes_through_all_factors() -> None:
    """Three slots that do not look at each other: every draft of a vocabulary of three, accepted token by token."""
    V, J = 3, 3
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(J, 4, generator=g, dtype=torch.float64)
    p_JV = (2 * torch.randn(J, V, generator=g, dtype=torch.float64)).softmax(-1)
    head = nn.Linear(4, V, bias=False).double()

    def enumerated() -> Tensor:
        q_JV = head(hidden).softmax(-1)
        total = q_JV.new_zeros(())
        for draft in product(range(V), repeat=J):
            drawn = prod(q_JV[j, x] for j, x in enumerate(draft))
            kept = [(p_JV[j, x] / q_JV[j, x]).clamp_max(1) for j, x in enumerate(draft)]
            total = total + drawn * sum(prod(kept[: m + 1]) for m in range(J))
        return total

    wanted_E = enumerated()
    (wanted,) = torch.autograd.grad(wanted_E, head.weight)
    module = ChunkedLoss(head.float(), Mix(tv=1.0), chunk=2)
    # a target whose head hands its states on
    eye = nn.Linear(V, V, bias=False)
    eye.weight.data = torch.eye(V)
    teacher = Teacher(p_JV.log().float(), ChunkedLoss(eye, Mix(tv=1.0), chunk=2).whole)
    label, states = torch.zeros(J, dtype=torch.long), hidden.float()
    alpha, terms = module(states, label, teacher, only=Passed("alpha"))
    assert (terms, alpha.requires_grad) == ({}, False)
    known = torch.ones(1, J, dtype=torch.bool)
    assert float(expected_length(alpha[None], known)) == pytest.approx(wanted_E.item(), rel=1e-5)
    loss, _ = module(states, label, teacher, length_gain(alpha[None], known, 0.0)[0])
    (ours,) = torch.autograd.grad(loss, head.weight)
    torch.testing.assert_close(-ours.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", [False, True])
def test_siblings_are_asked_for_as_they_are_weighed(part: bool) -> None:
    """One of three draws: what the weights are made of, what is minimised and what a draw is, by the definition."""
    objective = ObjectiveConfig(chunk=2, kl=0.0, tv=1.0, positions="accepted", siblings=3)
    pace, mix = DraftPace.of(objective), Mix.of(objective)
    assert pace is not None
    V, J, ids = 6, 4, torch.tensor([0, 2, 3, 5]) if part else torch.arange(6)
    g = torch.Generator().manual_seed(0)
    head, eye = nn.Linear(3, len(ids), bias=False), nn.Linear(V, V, bias=False)
    head.weight.data, eye.weight.data = torch.randn(len(ids), 3, generator=g), torch.eye(V)
    states, logits = torch.randn(J, 3, generator=g), torch.randn(J, V, generator=g)
    cut = partial(OfTarget.of, ids_U=ids, mix=mix) if part else None
    teacher = Teacher(logits, ChunkedLoss(eye, mix, chunk=2).whole, cut=cut)
    label, q, p = torch.tensor([0, 1, 0, 2]), head(states).softmax(-1), logits.softmax(-1)[:, ids]
    wanted = torch.minimum(p, 1 - (1 - q) ** 3).sum(-1)
    module = ChunkedLoss(head, mix, chunk=2)
    torch.testing.assert_close(module(states, label, teacher, only=pace.asks)[0], wanted)
    torch.testing.assert_close(module(states, label, teacher)[0], (1 - wanted).sum())
    chain = module(states, label, teacher)[1]["alpha"]  # what is reported stays that of one draw
    torch.testing.assert_close(chain, torch.minimum(p, q).sum().detach())
    told = module(states, label, teacher, only=Passed("label_q", 3))[0]
    torch.testing.assert_close(told, 1 - (1 - q[torch.arange(J), label]) ** 3)


def test_its_own_drafts_are_chains() -> None:
    with pytest.raises(ValueError, match="siblings is 2 and positions is on-policy"):
        ObjectiveConfig(positions="on-policy", siblings=2)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10_000), st.sampled_from([0.5, 0.9, 1.0]))
def test_what_is_reached_has_the_gradient_along_the_text(A: int, J: int, seed: int, share: float) -> None:
    g = torch.Generator().manual_seed(seed)
    known = torch.rand(A, J, generator=g) < share
    alpha, kept = ((1.4 * torch.rand(2, A, J, generator=g, dtype=torch.float64) - 0.2).clamp(0, 1)).unbind()
    alpha.requires_grad_()
    kept.requires_grad_()
    along = expected_length(alpha, known, kept).sum() + 0 * (alpha.sum() + kept.sum())
    wanted = torch.autograd.grad(along, (alpha, kept))
    torch.testing.assert_close(reached(alpha, kept, known, 0.0), wanted)


def test_what_is_reached_by_hand() -> None:
    """Kept with 0.5, 0 and 1, alphas 0.8, 0.6 and 0.4: the third is never reached, and kept the second would open it."""
    alpha, kept = torch.tensor([[0.8, 0.6, 0.4]]), torch.tensor([[0.5, 0.0, 1.0]])
    weight, gain = reached(alpha, kept, torch.ones(1, 3, dtype=torch.bool), 0.0)
    assert weight[0].tolist() == pytest.approx([1.0, 0.5, 0.0])
    assert gain[0].tolist() == pytest.approx([0.6, 0.5 * 0.4, 0.0])
    weight, gain = reached(alpha, kept, torch.tensor([[True, False, True]]), 0.0)
    assert weight[0].tolist() == pytest.approx([1.0, 0.0, 0.5])
    assert gain[0].tolist() == pytest.approx([0.4, 0.0, 0.0])
    weight, _ = reached(alpha, kept, torch.ones(1, 3, dtype=torch.bool), 0.5)
    assert weight[0].tolist() == pytest.approx([1.0, 0.75, 0.375])


@pytest.mark.parametrize("own", [False, True])
def test_texts_of_the_target_say_what_becomes_of_the_drafters_own_drafts(own: bool) -> None:
    """Drafts and the target look at what is in front: all drafts of a vocabulary of three, tried token by token.

    `own`: the drafter has a part of the vocabulary.
    """
    V, J = 3, 3
    g = torch.Generator().manual_seed(3)
    prefixes = [prefix for j in range(J) for prefix in product(range(V), repeat=j)]
    hidden = {prefix: torch.randn(4, generator=g) for prefix in prefixes}
    p = {prefix: (2 * torch.randn(V, generator=g)).softmax(-1) for prefix in prefixes}
    ids_U = torch.tensor([0, 2]) if own else torch.arange(V)
    head = nn.Linear(4, len(ids_U), bias=False)

    def q(prefix: tuple[int, ...]) -> dict[int, Tensor]:
        return dict(zip(ids_U.tolist(), head(hidden[prefix]).softmax(-1), strict=True))

    wanted_E = torch.zeros(())
    for draft in product(ids_U.tolist(), repeat=J):
        behind = [(draft[:j], x) for j, x in enumerate(draft)]
        drawn = torch.stack([q(prefix)[x] for prefix, x in behind]).prod()
        kept = torch.stack([(p[prefix][x] / q(prefix)[x]).clamp_max(1) for prefix, x in behind])
        wanted_E = wanted_E + drawn * kept.cumprod(0).sum()
    (wanted,) = torch.autograd.grad(wanted_E, head.weight)
    mix = Mix(tv=1.0)
    module = ChunkedLoss(head, mix, chunk=2)
    eye = nn.Linear(V, V, bias=False)
    eye.weight.data = torch.eye(V)
    whole = ChunkedLoss(eye, mix, chunk=2).whole
    pace = DraftPace(Passed("kept"), 0.0, tv=1.0)
    total, gradient = 0.0, torch.zeros_like(head.weight)
    for text in product(range(V), repeat=J):  # every text of the target, by its probability
        behind = [text[:j] for j in range(J)]
        chance = float(torch.stack([p[prefix][x] for prefix, x in zip(behind, text, strict=True)]).prod())
        states = torch.stack([hidden[prefix] for prefix in behind])
        teacher = Teacher(
            torch.stack([p[prefix].log() for prefix in behind]),
            whole,
            cut=partial(OfTarget.of, ids_U=ids_U, mix=mix) if own else None,
        )
        label = drafted(torch.tensor(text), ids_U)
        passed, _ = module(states, label, teacher, only=Passed("kept"))
        share = pace(passed, torch.zeros(J, dtype=torch.long), torch.arange(J), (1, J))
        alpha, kept = passed.unbind(1)
        total += chance * float(expected_length(alpha[None], torch.ones(1, J, dtype=torch.bool), kept[None]))
        loss, _ = module(states, label, teacher, share)
        gradient -= chance * torch.autograd.grad(loss, head.weight)[0]
    assert total == pytest.approx(wanted_E.item(), rel=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def rows() -> dict[str, Tensor]:
    """A row of two documents, one that is labels behind a prompt; labels are missing in the middle."""
    documents = torch.tensor([[0] * 8 + [1] * 6, [0] * 14])
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[0, [0, 8]] = mask[1, [0, 1, 2, 9]] = False
    g = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (2, 14), generator=g),
        "loss_mask": mask,
        "positions": torch.tensor([[*range(8), *range(6)], [*range(14)]]),
        "documents": documents,
    }


BLOCKS = BlockConfig(size=4, decoder_layers=1, anchors=4)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "distill": ("distill", {}),
    "distill, a part of the vocabulary": ("distill", {"ids": range(0, VOCABULARY, 2)}),
    "medusa": ("medusa", {"medusa": MedusaConfig(heads=3)}),
    "hydra": ("hydra", {"medusa": MedusaConfig(heads=3)}),
    "eagle3": ("eagle3", {"eagle3": Eagle3Config(passes=3, ce=0.0), "ids": range(0, VOCABULARY, 2)}),
    "mtp": ("mtp", {"mtp": MtpConfig(passes=3)}),
    "dflash": ("dflash", {"block": BLOCKS}),
    "dflash, a mean over blocks": ("dflash", {"block": BLOCKS.model_copy(update={"weigh": "blocks"})}),
    "dspark": ("dspark", {"block": BLOCKS}),
    "peagle": ("peagle", {"peagle": PeagleConfig(depths=3, decoder_layers=1, ce=0.0)}),
}


def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Tensor]:
    """What the weights were made of at last, as a table: alpha of each anchor's drafts, -1 where is none, and what is
    kept behind it. [2, A, J]."""
    seen: list[Tensor] = []
    real = DraftPace.__call__

    def look(self: DraftPace, passed_P: Tensor, anchor_P: Tensor, draft_P: Tensor, counts: tuple[int, int]) -> Tensor:
        table = torch.full((2, *counts), -1.0, dtype=torch.float64)
        table[:, anchor_P, draft_P] = (passed_P.T if passed_P.ndim == 2 else passed_P).double()
        seen.append(table)
        return real(self, passed_P, anchor_P, draft_P, counts)

    monkeypatch.setattr(DraftPace, "__call__", look)
    return lambda: seen[-1]


WEIGHED = [
    *((name, positions, 1) for name in CASES for positions in ("accepted", "on-policy")),
    *((name, "accepted", 3) for name in ("distill", "eagle3", "mtp", "dflash")),
]


@pytest.mark.parametrize(("name", "positions", "siblings"), WEIGHED)
def test_the_loss_of_a_family_has_the_gradient_of_its_accepted_length(
    name: str,
    positions: Literal["accepted", "on-policy"],
    siblings: int,
    target: Backbone,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By finite differences along the gradient, over all weights of the drafter at once."""
    method, sections = CASES[name]
    torch.manual_seed(0)
    length_config = ObjectiveConfig(
        chunk=5, kl=0.0, tv=1.0, positions=positions, siblings=siblings, draft_length=3, from_kl_share=0.0
    )
    goal = build(method, target.model, **sections, objective=length_config)
    for number, weight in enumerate(goal.draft().parameters()):  # what begins as zeros or as the target's learns apart
        weight.data += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    batch, last = rows(), watched(monkeypatch)
    teacher_output, S = goal.prepare(batch), batch["input_ids"].shape[1]
    labels_R = batch["loss_mask"].sum(1).double()

    def length() -> float:
        """As it is weighed: heads and passes add up, blocks are a mean of each row's, times its labels."""
        with torch.no_grad():
            goal.module(batch, teacher_output)
        alpha_AJ, kept_AJ = last()
        length_A = expected_length(alpha_AJ.clamp_min(0), alpha_AJ >= 0, kept_AJ.clamp_min(0))
        if method not in ("dflash", "dspark"):
            return float(length_A.sum())
        rows_A, there = torch.arange(len(length_A)) // S, (alpha_AJ >= 0).any(1)
        if "mean" in name:
            return float(length_A[there].mean() * labels_R.sum())
        return float(sum(length_A[there & (rows_A == row)].mean() * labels_R[row] for row in range(2)))

    loss, _ = goal.module(batch, teacher_output)
    parameters = [each for each in goal.draft().parameters() if each.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    size = float(sum(each.double().pow(2).sum() for each in gradients)) ** 0.5
    assert size > 1e-2
    step, ends = 0.005 / size, []
    for sign in (1, -2):
        for weight, gradient in zip(parameters, gradients, strict=True):
            weight.data -= sign * step * gradient / size
        ends.append(length())
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(size, rel=0.03)
    assert ends[0] > ends[1]


def test_a_text_is_drafts_behind_every_place_of_it() -> None:
    """Two documents of three tokens, a prompt of one each, drafts of two: acceptance .5, .4 and .3, .2."""
    batch = {
        "input_ids": torch.zeros(1, 6, dtype=torch.long),
        "loss_mask": torch.tensor([[False, True, True, False, True, True]]),
        "documents": torch.tensor([[0, 0, 0, 1, 1, 1]]),
    }
    weights = as_chains(torch.tensor([0.5, 0.4, 0.3, 0.2]), batch, 2, DraftPace(Passed("alpha"), 0.0))
    # the first draft of a document: 1 + the second's alpha; the second: of the first's alpha, and first of its own
    assert weights.tolist() == pytest.approx([1.4, 1.5, 1.2, 1.3])
    alpha_kept = torch.tensor([[0.5, 0.1], [0.4, 0.9], [0.3, 0.2], [0.2, 0.8]])
    weights = as_chains(alpha_kept, batch, 2, DraftPace(Passed("kept"), 0.0, tv=2.0))
    # reached: always as a first draft, and as a second where the first is kept; gained: the second's alpha, times tv
    assert weights.flatten().tolist() == pytest.approx([1.0, 0.8, 1.1, 0.0, 1.0, 0.4, 1.2, 0.0])


# what a family learns beside the distributions: its section, and the field that weighs it
BESIDE: dict[str, tuple[Any, str]] = {
    "eagle": (EagleConfig(passes=3), "feature"),
    "dflash2": (DFlash2Config(candidates=40), "weight"),
    "dspark": (DSparkConfig(), "confidence"),
}


@pytest.mark.parametrize("positions", ["accepted", "on-policy"])
@pytest.mark.parametrize("method", BESIDE)
def test_what_is_learnt_beside_counts_as_often_as_its_draft(
    method: str, positions: Literal["accepted", "on-policy"], target: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by what its token opens."""
    section, field = BESIDE[method]
    objective = ObjectiveConfig(chunk=5, kl=0.0, tv=1.0, positions=positions)

    def loss(value: float, weight: float) -> float:
        torch.manual_seed(0)
        own = section.model_copy(update={field: value})  # 0 too, where a recipe asks for more
        goal = build(method, target.model, block=BLOCKS, objective=objective, **{method: own})
        counts = torch.tensor([weight, 100.0] if positions == "on-policy" else weight)
        monkeypatch.setattr(
            DraftPace, "_weights", lambda _self, passed_AJ, _known: torch.ones_like(passed_AJ) * counts
        )
        with torch.no_grad():
            return float(goal.module.eval()(rows(), goal.prepare(rows()))[0])

    once, thrice = (loss(1.0, weight) - loss(0.0, weight) for weight in (1.0, 3.0))
    assert once > 0.01
    assert thrice == pytest.approx(3 * once, rel=1e-3)


def test_what_a_kept_token_opens_counts_as_the_mix_of_the_step_says(target: Backbone) -> None:
    """Nothing is learnt of the total variation at the first of very many steps, so nothing of what lies behind it."""
    torch.manual_seed(0)
    objective = ObjectiveConfig(kl=0.0, tv=1.0, positions="on-policy", from_kl_share=1.0)
    moving = build("distill", target.model, objective=objective)
    moving.set_steps(10**6)
    moving.begin_step(0, 0)
    plain = build("distill", target.model, objective=ObjectiveConfig(positions="on-policy"))
    plain.draft().load_state_dict(moving.draft().state_dict())
    batch = rows()
    losses = [goal.module.train()(batch, goal.prepare(batch))[0] for goal in (moving, plain)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["distill", "medusa", "mtp", "dflash"])
def test_a_batch_of_prompts_alone(name: str, target: Backbone) -> None:
    method, sections = CASES[name]
    goal = build(method, target.model, **sections, objective=ObjectiveConfig(kl=0.0, tv=1.0, positions="on-policy"))
    batch = rows() | {"loss_mask": torch.zeros(2, 14, dtype=torch.bool)}
    loss, _ = goal.module(batch, goal.prepare(batch))
    assert loss.item() == 0


@pytest.mark.parametrize("name", ["medusa", "eagle3", "dspark"])
def test_the_accepted_length_grows(name: str, target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    method, sections = CASES[name]
    torch.manual_seed(0)
    goal = build(method, target.model, **sections, objective=ObjectiveConfig(**LENGTH))
    batch, last = rows(), watched(monkeypatch)
    teacher_output = goal.prepare(batch)
    optimizer, lengths = torch.optim.Adam(goal.module.parameters(), lr=3e-3), []
    for _ in range(8):
        loss, _ = goal.module(batch, teacher_output)
        alpha_AJ, _ = last()
        lengths.append(float(expected_length(alpha_AJ.clamp_min(0), alpha_AJ >= 0).sum()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert lengths[-1] > 1.02 * lengths[0]


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ({"method": "bpd", "objective": {"positions": "accepted"}}, "weighs all that it learns alike: leave it out"),
        (
            {"method": "distill", "objective": {"positions": "accepted", "draft_length": 1}},
            "by objective.draft_length: raise that",
        ),
        (
            {"method": "distill", "objective": {"positions": "on-policy"}, "rollouts": {"share": 0.5}},
            "rollouts.by is student: leave one of them out",
        ),
        ({"method": "eagle3", "eagle3": {"passes": 1}, "objective": {"positions": "accepted"}}, "by eagle3.passes"),
        ({"method": "eagle3", "objective": {"positions": "d-pace", "pace_floor": 0}}, "pace_floor is 0 with"),
        (
            {"method": "dflash", "block": {"ce_label": "target"}, "objective": {"positions": "on-policy"}},
            "goes by the text's own tokens, and block.ce_label is target",
        ),
    ],
)
def test_requests_that_make_no_sense(recipe: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        check_recipe(Recipe(**recipe))
