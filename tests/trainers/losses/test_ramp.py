"""Mixes that move from step to step, and teachers cut to their likeliest tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import make_target
from draftsmith.errors import RequestError
from draftsmith.launch.check.unread import check_read
from draftsmith.launch.recipe.load import load_recipe, shipped_recipes
from draftsmith.trainers.config import ModelConfig, ObjectiveConfig
from draftsmith.trainers.losses.mix import TERMS, Mix
from draftsmith.trainers.losses.ramp import TV_SHARE, Ramp
from draftsmith.trainers.losses.terms import check_terms
from helpers.models.method_objectives import build

SMALL = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=1, head_size=16, max_positions=256)
CUT = 3


def weights(mix: Mix) -> dict[str, float]:
    return {name: getattr(mix, name) for name in TERMS if getattr(mix, name)}


def test_weights_move_evenly_from_kl_to_the_mix() -> None:
    ramp = Ramp.of(ObjectiveConfig(kl=0.0, tv=2.0, ce=0.5, from_kl_share=0.4))
    mixes = [weights(ramp.at(step, 10)) for step in range(5)]
    for step, part in enumerate([0.25, 0.5, 0.75]):
        assert mixes[step] == pytest.approx({"kl": 1 - part, "tv": 2 * part, "ce": 0.5 * part})
    assert mixes[3] == mixes[4] == {"tv": 2.0, "ce": 0.5}


def test_a_kl_in_the_mix_stays() -> None:
    ramp = Ramp.of(ObjectiveConfig(kl=3.0, tv=1.0, from_kl_share=0.5))
    assert weights(ramp.at(0, 4)) == pytest.approx({"kl": 0.5 + 1.5, "tv": 0.5})
    assert weights(ramp.at(3, 4)) == {"kl": 3.0, "tv": 1.0}


@pytest.mark.parametrize(
    ("objective", "share"),
    [
        ({"kl": 0.0, "tv": 1.0}, TV_SHARE),
        ({"kl": 0.0, "tv": 1.0, "from_kl_share": 0.0}, 0.0),
        ({"kl": 0.0, "tv": 1.0, "ce": 0.1}, 0.0),
        ({"tv": 1.0}, 0.0),  # its KL is on unless the recipe says otherwise
        ({"kl": 0.0, "lk_alpha": 1.0}, 0.0),
        ({"kl": 0.0, "lk_lambda": 1.0, "from_kl_share": 0.7}, 0.7),
    ],
)
def test_a_total_variation_alone_begins_with_kl(objective: dict, share: float) -> None:
    assert Ramp.of(ObjectiveConfig(**objective)).share == share


def test_training_follows_the_ramp_and_validation_does_not() -> None:
    """The loss of every step is that step's mix of the terms that it reports."""
    torch.manual_seed(0)
    target = make_target("qwen3").model

    class Words:
        eos_token_id = None

    objective = ObjectiveConfig(kl=0.0, tv=1.0, from_kl_share=0.5)
    goal = build("distill", target, tokenizer=Words(), model=SMALL, objective=objective)
    goal.set_steps(8)
    ids = torch.randint(0, 61, (2, 10))
    batch = {
        "input_ids": ids,
        "loss_mask": torch.ones_like(ids, dtype=torch.bool),
        "positions": torch.arange(10).expand_as(ids),
        "documents": torch.zeros_like(ids),
    }
    for step, part in enumerate([0.25, 0.5, 0.75, 1.0, 1.0]):
        goal.begin_step(step, 0)
        _, terms = goal.module(batch, goal.prepare(batch))
        mixed = (1 - part) * terms["kl"] + part * terms["tv"]
        torch.testing.assert_close(terms["loss"], mixed)
        goal.module.eval()
        _, held_out = goal.module(batch, goal.prepare(batch))
        torch.testing.assert_close(held_out["loss"], held_out["tv"])
        goal.module.train()


def distributions(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(5, 9, generator=g), 2 * torch.randn(5, 9, generator=g)


def by_definition(name: str, p: list[float], q: list[float]) -> float:
    """One position in plain Python, p already cut and renormalised."""
    alpha = math.fsum(map(min, p, q))
    forward = math.fsum(a * math.log(a / b) for a, b in zip(p, q) if a)
    if name == "kl":
        return forward
    if name == "jsd":
        mean = [(a + b) / 2 for a, b in zip(p, q)]
        other = math.fsum(b * math.log(b / m) for b, m in zip(q, mean))
        return math.fsum(a * math.log(a / m) for a, m in zip(p, mean) if a) / 2 + other / 2
    if name == "tv":
        return 1 - alpha
    if name == "lk_alpha":
        return -math.log(alpha)
    if name == "top_k":
        best = sorted(range(len(p)), key=lambda v: -p[v])[:2]
        return -math.fsum(p[v] * math.log(q[v]) for v in best)
    share = math.exp(-3 * alpha)
    return share * forward + (1 - share) * (1 - alpha)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("name", ["kl", "jsd", "tv", "lk_alpha", "lk_lambda", "top_k"])
def test_a_compressed_teacher_is_its_likeliest_tokens_renormalised(name: str, temperature: float) -> None:
    """Every divergence, and the mass that is lost, against plain Python."""
    draft, target = distributions()
    asked: dict = {"kl": 0.0, name: 1.0, "top_k_tokens": 2}
    loss = Mix.of(ObjectiveConfig(**asked, temperature=temperature, teacher_top_k=CUT))
    draft.requires_grad_()
    terms = loss(draft, target, torch.zeros(5, dtype=torch.long))
    terms["loss"].sum().backward()
    assert draft.grad is not None
    assert torch.isfinite(draft.grad).all()
    assert draft.grad.abs().sum() > 0
    terms = {name: t.detach() for name, t in terms.items()}
    for row in range(5):
        p = (target[row].double() / temperature).softmax(-1).tolist()
        q = (draft[row].detach().double() / temperature).softmax(-1).tolist()
        kept = set(sorted(range(9), key=lambda v: -p[v])[:CUT])
        mass = math.fsum(p[v] for v in kept)
        cut = [p[v] / mass if v in kept else 0.0 for v in range(9)]
        assert float(terms["loss"][row]) == pytest.approx(by_definition(name, cut, q), rel=1e-4)
        assert float(terms["cut_mass"][row]) == pytest.approx(1 - mass, rel=1e-4)
        plain = zip(target[row].double().softmax(-1), draft[row].detach().double().softmax(-1))
        alpha = math.fsum(float(min(a, b)) for a, b in plain)
        assert float(terms["alpha"][row]) == pytest.approx(alpha, rel=1e-4)


def test_ties_are_kept_and_nothing_is_cut_of_a_small_vocabulary() -> None:
    target = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert Mix(teacher_top_k=2).cut(target).tolist() == [[2.0, 1.0, 1.0, -math.inf]]
    for whole in (4, 9, None):
        assert torch.equal(Mix(teacher_top_k=whole).cut(target), target)
    assert float(Mix(teacher_top_k=4).cut_mass(target)) == 0


def test_a_divergence_that_would_be_infinite_is_refused() -> None:
    with pytest.raises(RequestError, match=r"objective.reverse_kl is infinite where"):
        check_terms(ObjectiveConfig(reverse_kl=1.0, teacher_top_k=8))


@pytest.mark.parametrize("name", ["rollouts.share", "objective.from_kl_share", "objective.teacher_top_k"])
def test_what_a_method_does_not_read_is_refused_by_name(name: str) -> None:
    value = "8" if name.endswith("top_k") else "0.5"
    others = ("bpd-tiny", "boost-tiny") if name == "rollouts.share" else ("eagle-tiny", "eagle3-tiny", "target-tiny")
    for method in others:
        recipe = load_recipe(method, [(name, value)]).recipe
        with pytest.raises(RequestError, match=f"{name} is .* method `{recipe.method}` does not"):
            check_read(recipe)
    check_read(load_recipe("distill-tiny", [(name, value)]).recipe)


@pytest.mark.parametrize(
    ("recipe", "flag", "value", "remedy"),
    [
        ("eagle-tiny", "medusa.heads", "9", "train with `medusa` or `medusa2` or `hydra`"),
        ("medusa-tiny", "eagle3.passes", "3", "train with `eagle3`"),
        ("distill-tiny", "boost.members", "5", "train with `boost`"),
        ("distill-tiny", "tune.rank", "99", "train with `medusa2`"),
        ("medusa-tiny", "bpd.block", "9", "train with `bpd`"),
        ("medusa-tiny", "tune.how", "full", "train with `medusa2`"),
        ("bpd-tiny", "tune.rank", "9", "set bpd.backbone to tuned, or leave it out"),
        ("eagle-tiny", "model.layers", "3", "train with `target` or `distill` or `pard` or `boost`"),
        ("target-tiny", "probe.every_steps", "5", "train with `distill`"),
        ("target-tiny", "features.source", "cache", "train with `distill`"),
        ("target-tiny", "rollouts.by", "target", "train with `distill`"),
        ("distill-tiny", "rollouts.unlikelihood", "2.0", "train with `target`"),
    ],
)
def test_values_of_other_methods_are_refused(recipe: str, flag: str, value: str, remedy: str) -> None:
    made = load_recipe(recipe, [(flag, value)]).recipe
    with pytest.raises(RequestError, match=f"^{flag} is {value}, and method `{made.method}` does not.*{remedy}"):
        check_read(made)


@pytest.mark.parametrize("path", shipped_recipes(), ids=lambda path: path.stem)
def test_shipped_recipes_have_no_value_that_is_ignored(path: Path) -> None:
    check_read(load_recipe(path.stem).recipe)


def test_an_adapter_without_a_rank_is_refused() -> None:
    with pytest.raises(RequestError, match="lora.name is 'law', and lora.rank is not set"):
        check_read(load_recipe("distill-tiny", [("lora.name", "law")]).recipe)


def test_a_cache_of_rows_that_come_once_is_refused() -> None:
    flags = [("rollouts.share", "0.5"), ("features.source", "cache")]
    with pytest.raises(RequestError, match="would fill the cache"):
        check_read(load_recipe("distill-tiny", flags).recipe)
