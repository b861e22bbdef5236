"""The objective matrix: every term in every family, and the defaults as they were."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.projection import Projection
from draftsmith.errors import RequestError
from draftsmith.launch.check.models import check_recipe
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers import eagle
from draftsmith.trainers.config import ModelConfig, ObjectiveConfig
from draftsmith.trainers.heads import HeadLoss, last_states_of
from draftsmith.trainers.hydra import head_input
from draftsmith.trainers.losses import draft_vocabulary
from draftsmith.trainers.losses.chunked import ChunkedLoss, Teacher
from draftsmith.trainers.losses.mix import TERMS, UNKNOWN, Mix, Passed
from draftsmith.trainers.losses.pace import geometric
from draftsmith.trainers.method_config import Eagle3Config, EagleConfig, MedusaConfig
from draftsmith.trainers.spine import run
from helpers.models.method_objectives import build
from ruamel.yaml import YAML
from torch import Tensor, nn

Batch = dict[str, Tensor]
WORDS = [word for word in range(VOCABULARY) if word % 3 != 1]
SMALL = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=1, head_size=16, max_positions=64)
SEVERAL = ["medusa", "hydra", "hass", "eagle3"]  # those that learn several positions together
FAMILIES = ["distill", *SEVERAL, "eagle"]
ALL_TERMS = {name: 0.5 for name in TERMS}
OBJECTIVES = {name: {"kl": 0.0, name: 1.0} for name in TERMS} | {"all": ALL_TERMS}


class Words:
    """A tokenizer as far as a fresh draft asks."""

    eos_token_id = None


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return make_target("qwen3")


def rows() -> Batch:
    """Packed rows: documents of 7 and 4 tokens and padding; one of 12 with a prompt of 4."""
    documents = torch.tensor([[0] * 7 + [1] * 4 + [-1], [0] * 12])
    positions = torch.tensor([[*range(7), *range(4), 0], [*range(12)]])
    mask = (documents >= 0) & (positions > 0)
    mask[1, :4] = False
    mask[1, 8] = False  # in the middle of an answer
    g = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (2, 12), generator=g),
        "loss_mask": mask,
        "positions": positions,
        "documents": documents,
    }


def goal_for(family: str, backbone: Backbone, objective: ObjectiveConfig) -> Any:
    """An objective of a family whose own terms are off: the matrix alone teaches."""
    torch.manual_seed(1)
    model = backbone.model
    if family == "distill":
        return build("distill", model, tokenizer=Words(), model=SMALL, objective=objective)
    if family in ("medusa", "hydra"):
        return build(family, model, medusa=MedusaConfig(heads=3), objective=objective)
    if family == "eagle3":
        config = Eagle3Config(passes=3, layers=(0, 1, 2), ce=0.0)
        return build("eagle3", model, ids=WORDS, eagle3=config, objective=objective)
    passes = 3 if family == "hass" else 1
    own = EagleConfig(feature=0.0, ce=0.0, noise=0.0, passes=passes)
    return build("eagle", model, eagle=own, objective=objective)


def gradients(goal: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    loss, terms = goal.module(batch, goal.prepare(batch))
    gradients = torch.autograd.grad(loss, list(goal.draft().parameters()), materialize_grads=True)
    return loss.detach(), terms, list(gradients)


CASES = [(family, name, "geometric") for family in FAMILIES for name in OBJECTIVES]
CASES += [(family, name, "d-pace") for family in SEVERAL for name in ("ce", "lk_lambda")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("family", "name", "positions"), CASES)
def test_every_term_teaches_every_family(family: str, name: str, positions: str, backbone: Backbone) -> None:
    """Chunks change neither loss nor gradient, and a few steps bring the loss down."""
    batch = rows()
    weights = OBJECTIVES[name] | {"positions": positions, "temperature": 1.5}
    whole = goal_for(family, backbone, ObjectiveConfig(chunk=1000, **weights))
    goal = goal_for(family, backbone, ObjectiveConfig(chunk=3, **weights))
    ours, theirs = gradients(goal, batch), gradients(whole, batch)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-4)
    for mine, plain in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-4)
    assert max(float(each.abs().max()) for each in ours[2]) > 1e-4

    # D-PACE's weights grow while the draft learns: then the terms without weights are to fall
    def value() -> float:
        with torch.no_grad():
            loss, terms = goal.module(batch, goal.prepare(batch))
        if positions == "d-pace" and family in ("medusa", "hydra"):
            return sum(float(terms[f"head{k}_loss"]) for k in range(1, 4))
        if positions == "d-pace":
            return float(terms["text_ce" if name == "ce" else name])
        return float(loss)

    before = value()
    optimizer = torch.optim.Adam(goal.module.parameters(), lr=3e-3)
    for _ in range(6):
        loss, _ = goal.module(batch, goal.prepare(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert math.isfinite(before)
    assert value() < before


# ---- what is minimised, by hand ---------------------------------------------------------------


def by_hand(name: str, p: Tensor, q: Tensor, part: Tensor) -> Tensor:
    """A term at one position; `part` is p as it is, where p is renormalised."""
    alpha = torch.minimum(part, q).sum()
    kl = (p * (p / q).log()).sum()
    if name == "jsd":
        mean = (p + q) / 2
        return ((p * (p / mean).log()).sum() + (q * (q / mean).log()).sum()) / 2
    if name == "lk_lambda":
        share = float((-3 * alpha).exp())
        return share * kl + (1 - share) * (1 - alpha)
    if name == "top_k":
        best = p.topk(10).indices
        return -(p * q.log())[best].sum()
    return {"kl": kl, "reverse_kl": (q * (q / p).log()).sum(), "tv": 1 - alpha, "lk_alpha": -alpha.log()}[name]


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_draft_vocabulary_sees_what_it_can(name: str, temperature: float, backbone: Backbone) -> None:
    """EAGLE-3: distributions are renormalised to be compared, acceptance takes the target's as it is."""
    net = goal_for("eagle3", backbone, ObjectiveConfig(tv=1.0)).draft()
    mix = Mix(**{name: 0.7}, temperature=temperature)
    loss = draft_vocabulary.DraftVocabularyLoss(net, 2, 0.0, mix)
    g = torch.Generator().manual_seed(4)
    draft, wide = (2 * torch.randn(9, size, generator=g) for size in (len(WORDS), VOCABULARY))
    labels = torch.randint(0, VOCABULARY, (9,), generator=g)
    assert {int(label) in WORDS for label in labels} == {True, False}
    assert {int(best) in WORDS for best in wide.argmax(-1)} == {True, False}
    places = torch.tensor([WORDS.index(x) if x in WORDS else UNKNOWN for x in labels.tolist()])
    passes = torch.arange(9) % 2
    outputs = draft_vocabulary.OfTarget.of(wide, net.ids_U, mix)
    terms = loss(draft, outputs, torch.stack([places, passes], 1))
    for c in range(9):
        p = (wide[c] / temperature).double().softmax(-1)
        q = (draft[c] / temperature).double().softmax(-1)
        short = p[WORDS] / p[WORDS].sum()
        if name == "ce":
            label = int(labels[c])
            wanted = torch.zeros(())
            if label in WORDS:
                wanted = -draft[c].double().log_softmax(-1)[WORDS.index(label)]
        else:
            wanted = by_hand(name, short, q, p[WORDS])
            if name not in ("tv", "lk_alpha") and int(wide[c].argmax()) not in WORDS:
                wanted = torch.zeros(())
        assert float(terms["loss"][c]) == pytest.approx(0.7 * float(wanted), rel=1e-4, abs=1e-6)
        reported = terms["text_ce" if name == "ce" else name][c]
        assert float(reported) == pytest.approx(float(wanted) * (c % 2 == 0), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", [*sorted(set(TERMS) - {"ce"}), "all"])
def test_a_mix_is_the_weighted_sum(name: str) -> None:
    g = torch.Generator().manual_seed(2)
    draft, wide = (2 * torch.randn(6, 23, generator=g) for _ in range(2))
    label = torch.randint(0, 23, (6,), generator=g)
    weights = {each: 0.1 * (i + 1) for i, each in enumerate(TERMS)}
    weights = weights if name == "all" else {name: 0.3, "ce": 0.2}
    loss = Mix.of(ObjectiveConfig(**{"kl": 0.0} | weights))(draft, wide, label)
    for c in range(6):
        p, q = wide[c].double().softmax(-1), draft[c].double().softmax(-1)
        wanted = weights["ce"] * -q[label[c]].log()
        for each, weight in weights.items():
            if each != "ce":
                wanted = wanted + weight * by_hand(each, p, q, p)
        assert float(loss["loss"][c]) == pytest.approx(float(wanted), rel=1e-4)
    assert set(loss) == {"loss", "kl", "ce", "alpha", *weights}


def d_pace_by_hand(label_q: list[dict[tuple[int, int], float]]) -> list[dict[tuple[int, int], float]]:
    """`label_q[j]`: q(label) by anchor (row, position); the weights in the same shape."""
    weights: list[dict[tuple[int, int], float]] = [{} for _ in label_q]
    for j, anchors in enumerate(label_q):
        for anchor in anchors:
            total = 0.0
            for m in range(j, len(label_q)):
                if anchor in label_q[m]:
                    alive = [0.5 * each[anchor] + 0.5 for each in label_q[: m + 1] if anchor in each]
                    total += math.prod(alive)
            weights[j][anchor] = total
    return weights


@pytest.mark.parametrize("family", SEVERAL)
def test_d_pace_weighs_labels_by_how_far_a_draft_comes(family: str, backbone: Backbone) -> None:
    """Cross-entropy, all logits at once and every position by itself."""
    batch = rows()
    objective = ObjectiveConfig(kl=0.0, ce=1.0, positions="d-pace", chunk=4)
    goal = goal_for(family, backbone, objective)
    with torch.no_grad():  # heads begin as the target's own: they are to differ
        for i, parameter in enumerate(goal.draft().parameters()):
            g = torch.Generator().manual_seed(i)
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=g))
    teacher_output, ids = goal.prepare(batch), batch["input_ids"]
    head = backbone.model.get_output_embeddings()
    label_q: list[dict[tuple[int, int], float]] = []
    surprise: list[dict[tuple[int, int], Tensor]] = []
    first = 2
    if family not in ("medusa", "hydra"):
        net = goal.draft()
        hidden = teacher_output.hidden_RSH if family == "hass" else net.fuse(teacher_output.fused_RSF)
        outputs = net.unroll(
            hidden, teacher_output.embeds_RSH, batch["positions"], batch["documents"], 3, detach=family == "hass"
        )
    for j in range(3):
        label_q.append({})
        surprise.append({})
        for r in range(2):
            for t in range(12 - first - j):
                at = t + first + j
                same = batch["documents"][r, t] == batch["documents"][r, at]
                if not (batch["loss_mask"][r, at] and same):
                    continue
                label = int(ids[r, at])
                if family in ("medusa", "hydra"):
                    reads = last_states_of(teacher_output.hidden_RSH)
                    if family == "hydra":
                        reads = partial(
                            head_input, read_RSH=teacher_output.hidden_RSH, embeds_RSH=teacher_output.embeds_RSH
                        )
                    given = reads(j + 1)[r, t]
                    logits = goal.draft().lm_heads[j](goal.draft().head(j + 1, given[None]))[0]
                elif family == "hass":
                    logits = head(outputs[j][r, t])
                else:
                    logits = torch.full((VOCABULARY,), float("-inf"))
                    logits[WORDS] = net.lm_head(net.norm(outputs[j][r, t]))
                log_q = logits.log_softmax(-1)[label]
                label_q[j][r, t] = float(log_q.detach().exp())
                surprise[j][r, t] = -log_q if log_q > -1e9 else torch.zeros(())
    weights = d_pace_by_hand(label_q)
    wanted = sum(weights[j][anchor] * loss for j in range(3) for anchor, loss in surprise[j].items())
    assert any(0.6 < w < 2.5 for w in weights[0].values())
    loss, _ = goal.module(batch, teacher_output)
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    parameters = list(goal.draft().parameters())
    ours = torch.autograd.grad(loss, parameters, retain_graph=True)
    for mine, plain in zip(ours, torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-4)


def eagle_loss(backbone: Backbone, objective: ObjectiveConfig, **own: float) -> float:
    torch.manual_seed(1)
    goal = build("eagle", backbone.model, eagle=EagleConfig(noise=0.0, passes=2, **own), objective=objective)
    return float(goal.module(rows(), goal.prepare(rows()))[0].detach())


def test_a_place_counts_as_a_whole(backbone: Backbone) -> None:
    """EAGLE's features and distributions by the same weights, D-PACE's or fixed ones."""
    pace = ObjectiveConfig(positions="d-pace")
    parts = [eagle_loss(backbone, pace, feature=f, ce=1.0 - f) for f in (1.0, 0.0)]
    both = eagle_loss(backbone, pace, feature=1.0, ce=1.0)
    assert sum(parts) == pytest.approx(both, rel=1e-5)
    plain = ObjectiveConfig()
    assert parts[0] < eagle_loss(backbone, plain, feature=1.0, ce=0.0)
    for feature in (0.0, 1.0):
        of_decay = [
            eagle_loss(backbone, plain, feature=feature, ce=1.0 - feature, decay=decay) for decay in (1.0, 0.5, 0.25)
        ]
        second = 2 * (of_decay[0] - of_decay[1])
        assert second > 0
        assert of_decay[2] == pytest.approx(of_decay[0] - 0.75 * second, rel=1e-4)


# ---- defaults as they were --------------------------------------------------------------------
# The formulas from before there was a matrix, word for word. EAGLE's own loss has been fused since
# (`soft_cross_entropy.py`), which rounds otherwise.


def old_distillation(draft: Tensor, target: Tensor, label: Tensor, kl: float, ce: float, temperature: float) -> Tensor:
    log_q = (draft / temperature).log_softmax(-1)
    log_p = (target / temperature).log_softmax(-1)
    kl_C = (log_p.exp() * (log_p - log_q)).nan_to_num(0.0).sum(-1)
    return kl * kl_C + ce * F.cross_entropy(draft, label, reduction="none")


def old_distributions(draft: Tensor, target: Tensor, ce: float, top_k: float) -> Tensor:
    p, log_q = target.softmax(-1), draft.log_softmax(-1)
    each = -(p * log_q).nan_to_num(0.0)
    loss = ce * each.sum(-1)
    if top_k:
        best = p.topk(10).indices
        loss = loss + top_k * each.gather(-1, best).sum(-1)
    return loss


def old_draft_vocabulary(draft: Tensor, target: Tensor, net: Any, passes: Tensor) -> Tensor:
    log_q, own = draft.log_softmax(-1), target[:, net.ids_U]
    best = target.argmax(-1)
    ce = -(own.softmax(-1) * log_q).nan_to_num(0.0).sum(-1) * net.t2d[best]
    return ce * 0.8**passes


def assert_same(
    ours: Callable[[Tensor], Tensor], old: Callable[[Tensor], Tensor], V: int, *, bits: bool = True
) -> None:
    """Values and gradients, on flat distributions and on sharp ones; to the bit, or but for rounding."""
    g = torch.Generator().manual_seed(8)
    for scale in (0.3, 3.0, 30.0):
        draft = (scale * torch.randn(33, V, generator=g)).requires_grad_()
        one, two = ours(draft), old(draft)
        pairs = [(one, two), [torch.autograd.grad(each.sum(), draft)[0] for each in (one, two)]]
        for mine, was in pairs:
            close = {"rtol": 0, "atol": 0} if bits else {"rtol": 2e-6, "atol": 1e-6}
            torch.testing.assert_close(mine, was, **close)


P = 33


def others(V: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(9)
    target, label = 3 * torch.randn(P, V, generator=g), torch.randint(0, V, (P,), generator=g)
    return target, label, torch.randint(0, 7, (P,), generator=g)


@pytest.mark.parametrize("weights", [{}, {"kl": 1.0}, {"ce": 0.1}, {"kl": 0.7, "ce": 0.3, "temperature": 2.0}])
def test_distillation_is_as_it_was(weights: dict[str, float]) -> None:
    target, label, _ = others(40)
    loss = Mix.of(ObjectiveConfig(**weights))
    was = {"kl": 1.0, "ce": 0.0, "temperature": 1.0} | weights
    assert_same(lambda x: loss(x, target, label)["loss"], lambda x: old_distillation(x, target, label, **was), 40)


def test_heads_are_as_they_were() -> None:
    _, label, _ = others(40)
    loss = HeadLoss(ObjectiveConfig(kl=0, ce=1))
    assert_same(
        lambda x: loss(x, None, label)["loss"], lambda x: 1.0 * F.cross_entropy(x, label, reduction="none"), 40
    )


@pytest.mark.parametrize("top_k", [0.0, 1.0])
def test_eagle_is_as_it_was(top_k: float) -> None:
    target, label, passes = others(40)
    mix = Mix.of(ObjectiveConfig(), kl=0.0)
    assert mix.asked == []
    loss = eagle.DistributionLoss(0.1, top_k, 10, 7, mix)
    label_pass = torch.stack([label, passes], 1)
    assert_same(
        lambda x: loss(x, target, label_pass)["loss"],
        lambda x: old_distributions(x, target, 0.1, top_k),
        40,
        bits=False,
    )


def test_eagle_3_is_as_it_was(backbone: Backbone) -> None:
    """Through the chunks, where pass j now gets its weight."""
    config, target = Eagle3Config(layers=(0, 1, 2)), backbone.model
    goal = build("eagle3", target, ids=WORDS, eagle3=config, objective=ObjectiveConfig(chunk=7))
    net, loss = goal.draft(), goal.module.head.loss
    wide, label, passes = others(VOCABULARY)
    outputs = draft_vocabulary.OfTarget.of(wide, net.ids_U, Mix())
    label_pass = torch.stack([label, passes], 1)
    shares = geometric(passes, config.decay)
    assert_same(
        lambda x: loss(x, outputs, label_pass)["loss"] * shares,
        lambda x: old_draft_vocabulary(x, wide, net, passes),
        len(WORDS),
        bits=False,
    )


def test_weights_of_positions_reach_the_sum_and_not_the_report() -> None:
    g = torch.Generator().manual_seed(3)
    head = nn.Linear(8, 19, bias=False)
    hidden = torch.randn(P, 8, generator=g).requires_grad_()
    teacher = Teacher(torch.randn(P, 8, generator=g), Projection(torch.randn(19, 8, generator=g)))
    label, share = torch.randint(0, 19, (P,), generator=g), torch.rand(P, generator=g)
    chunked = ChunkedLoss(head, Mix(0.5, 0.5), chunk=5)
    loss, terms = chunked(hidden, label, teacher, share)
    logits = head(hidden)
    plain = old_distillation(logits, teacher.hidden_PH @ teacher.projection.weight_VH.T, label, 0.5, 0.5, 1.0)
    torch.testing.assert_close(loss, (plain * share).sum())
    torch.testing.assert_close(terms["loss"], plain.sum().detach())
    ours = torch.autograd.grad(loss, [hidden, head.weight])
    for mine, wanted in zip(ours, torch.autograd.grad((plain * share).sum(), [hidden, head.weight]), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_what_the_draft_says_of_labels() -> None:
    """In chunks, without a gradient; a label that is none has probability 0."""
    g = torch.Generator().manual_seed(3)
    head, hidden = nn.Linear(8, 19, bias=False), torch.randn(P, 8, generator=g).requires_grad_()
    label = torch.randint(0, 19, (P,), generator=g)
    label[4] = UNKNOWN
    sizes: list[int] = []
    chunked = ChunkedLoss(head, Mix(1.0, 0.0), chunk=5)
    real = F.linear

    def spy(x: Tensor, *more: Any) -> Tensor:
        sizes.append(len(x))
        return real(x, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.drafters.projection.F.linear", spy)
        label_q, terms = chunked(hidden, label, only=Passed("label_q"))
    assert (max(sizes), sum(sizes)) == (5, P)
    assert (terms, label_q.requires_grad) == ({}, False)
    wanted = head(hidden).softmax(-1).gather(-1, label.clamp_min(0)[:, None])[:, 0].detach()
    wanted[4] = 0
    torch.testing.assert_close(label_q, wanted)


# ---- requests that make no sense --------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (
            {"method": "distill", "objective": {"positions": "d-pace", "draft_length": 1}},
            "learns one, by objective.draft_length",
        ),
        ({"method": "bpd", "objective": {"positions": "d-pace"}}, "weighs all that it learns alike: leave it out"),
        ({"method": "eagle", "objective": {"positions": "d-pace"}}, "learns one, by eagle.passes"),
        (
            {"method": "eagle3", "eagle3": {"passes": 1}, "objective": {"positions": "d-pace"}},
            "learns one, by eagle3.passes",
        ),
        ({"method": "pard", "objective": {"positions": "d-pace"}}, "weighs all that it learns alike"),
        (
            {"method": "medusa", "medusa": {"heads": 1}, "objective": {"positions": "d-pace"}},
            "learns one, by medusa.heads",
        ),
        ({"method": "distill", "objective": {"kl": 0}}, "nothing would be learnt"),
        ({"method": "hydra", "objective": {"kl": 0}}, "nothing would be learnt"),
        ({"method": "eagle", "eagle": {"feature": 0, "ce": 0}}, "nothing would be learnt"),
        ({"method": "eagle3", "eagle3": {"ce": 0}}, "nothing would be learnt"),
        ({"method": "target", "objective": {"tv": 1}}, "objective.tv compares with a target's distribution"),
    ],
)
def test_requests_that_make_no_sense(recipe: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Refused before training and by training, with the same words."""
    made = Recipe(**recipe)
    with pytest.raises(RequestError, match=reason):
        check_recipe(made)
    with pytest.raises(RequestError, match=reason):
        run(made, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "recipe",
    [
        {"method": "eagle", "eagle": {"feature": 0, "ce": 0}, "objective": {"lk_alpha": 1}},
        {"method": "eagle", "eagle": {"passes": 2}, "objective": {"positions": "d-pace"}},
        {"method": "eagle3", "eagle3": {"ce": 0}, "objective": {"tv": 1, "kl": 1}},
        {"method": "medusa2", "objective": {"positions": "d-pace"}},
        {"method": "distill", "objective": {"kl": 0, "jsd": 1}},
        {"method": "target"},
    ],
)
def test_requests_that_do(recipe: dict[str, Any]) -> None:
    check_recipe(Recipe(**recipe))


def test_the_examples_of_the_docs_are_recipes() -> None:
    page = Path(eagle.__file__).parents[1] / "docs" / "recipes.md"
    examples = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        check_recipe(Recipe.model_validate(YAML(typ="safe", pure=True).load(example)))
    table = page.read_text().split("## The objective")[1].split("\n## ")[0]
    assert [name for name in TERMS if f"| `{name}`" not in table] == []
