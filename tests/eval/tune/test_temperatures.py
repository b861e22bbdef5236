"""Draft temperatures that are chosen from distributions, against drafts whose right ones are known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_drafter
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.grids import BY_MODEL, Grid
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.model.ensemble import join
from draftsmith.drafters.temperatures import FACTORS
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.metrics import acceptance, counts_of
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.measure.speed import Costs
from draftsmith.eval.tune import profile
from draftsmith.eval.tune.profile import TRIED, Bench, Heat, Overlaps, best_temperatures, predict
from draftsmith.eval.tune.settings import Contender
from helpers.models.small_drafters import make_on_target

REQUESTS = [Request(Prompt(str(n), "all", (), chat=False), [n + 1, n + 2, n + 3], n) for n in range(8)]
HOW: dict[str, Any] = {"max_new_tokens": 48, "seed": 0}


def sure(target: Backbone, factor: float, **settings: Any) -> DraftModel:
    """The target itself with logits `factor` times as large: at `factor` times its temperature it is the target."""
    drafter = make_drafter(target, noise=0.0, **settings)
    model: Any = drafter.module
    with torch.no_grad():
        model.model.norm.weight.mul_(factor)
    return drafter


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.5])
def test_the_factor_that_makes_the_draft_its_target_is_found(target: Backbone, factor: float) -> None:
    heat = best_temperatures(target, sure(target, factor, draft_length=3), REQUESTS, Warper(1.0), **HOW)
    assert heat is not None
    assert heat.factors_D == (factor,) * 3
    assert heat.up_to(3) == (() if factor == 1.0 else (factor,))
    if factor != 1.0:
        assert (heat.gain_D > 1.01).all()
    # and drafting so is what was foretold: nothing is rejected
    done = generate(
        target,
        sure(target, factor, draft_length=3, factors=heat.up_to(3)),
        [each.ids for each in REQUESTS],
        warper=Warper(1.0),
        max_new_tokens=24,
    )
    assert acceptance(counts_of(done.steps)).alpha_hat.value == pytest.approx(1, abs=1e-4)


def test_what_is_added_up_at_factor_1_is_what_the_rule_measures(target: Backbone) -> None:
    seen = Overlaps(3)
    how: dict[str, Any] = {"warper": Warper(0.8, top_k=9), "max_new_tokens": 40}
    done = generate(target, make_drafter(target, draft_length=3), [[1, 2, 3]], rule=seen, **how)
    plain = generate(target, make_drafter(target, draft_length=3), [[1, 2, 3]], **how)
    assert done.tokens == plain.tokens
    alpha_TD, tested_TD = plain.steps.alpha_hat_TBD[:-1, 0], plain.steps.tested_TBD[:-1, 0]
    # the last step may be cut, where the rule knows nothing of it
    lower = (alpha_TD * tested_TD).sum(0)
    own_D = seen.sums_DF[:, TRIED.index(1.0)]
    assert (own_D >= lower - 1e-4).all()
    assert (own_D <= lower + 1 + 1e-4).all()


@pytest.mark.parametrize("static", [False, True])
def test_chains_that_are_cut_add_up_to_what_the_rule_measures(static: bool, target: Backbone) -> None:
    """Shorter ones, and slots that were left out; several drafts were kept in some steps, one or none in others."""
    drafter = make_on_target("dspark", target, least=0.5)
    seen = Overlaps(drafter.draft_length)
    how: dict[str, Any] = {"warper": Warper(1.0), "max_new_tokens": 40, "static": static}
    steps = generate(target, drafter, [[1, 2, 3], [5, 9]], rule=seen, **how).steps
    tested_TBD, alpha_TBD = steps.tested_TBD, steps.alpha_hat_TBD
    assert len(set(tested_TBD.sum(-1).ravel().tolist())) > 2
    assert (seen.judged_D >= tested_TBD.sum((0, 1))).all()
    own_D, lower_D = seen.sums_DF[:, TRIED.index(1.0)], (alpha_TBD * tested_TBD).sum((0, 1))
    # rows that have ended are judged too, each step by 1 at the most
    assert (own_D >= lower_D - 1e-4).all()
    assert (own_D <= lower_D + seen.judged_D - tested_TBD.sum((0, 1)) + 1e-4).all()


def test_few_judged_tokens_take_the_factor_above() -> None:
    seen = Overlaps(3)
    seen.judged_D[:] = [100, 40, 5]
    seen.sums_DF[0, 2], seen.sums_DF[1, 5], seen.sums_DF[2, 7] = 80, 30, 5
    seen.sums_DF[:, TRIED.index(1.0)] = [70, 20, 1]
    heat = seen.best()
    assert heat.factors_D == (TRIED[2], TRIED[5], TRIED[5])
    np.testing.assert_allclose(heat.gain_D, [80 / 70, 1.5, 1.0])
    assert heat.up_to(3) == (TRIED[2], TRIED[5])
    assert Heat((1.0, 1.0, 0.9), np.ones(3)).up_to(2) == ()


def test_each_request_is_drawn_for_with_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it has in any selection, one request at a time; what is seen of all is added up."""
    drawn: list[tuple[Any, ...]] = []

    def decoded(_target: Any, _drafter: Any, prompts: Any, *, rule: Overlaps, **how: Any) -> None:
        drawn.append((prompts, how["requests"], how["seed"], how["warper"].temperature, how["max_new_tokens"]))
        rule.judged_D += [100, 60]
        rule.sums_DF[:, TRIED.index(1.0)] += [8, 4]
        rule.sums_DF[:, 2 + len(drawn)] += 30 + len(drawn)  # another factor for each request, the last is best

    monkeypatch.setattr(profile, "generate", decoded)
    monkeypatch.setattr(profile, "_MOST", 2)
    target, drafter = SimpleNamespace(eos_ids=(9,)), SimpleNamespace(draft_length=2)
    some = [Request(Prompt(str(n), "all", (), chat=False), [n, n], n) for n in (4, 7, 1)]
    heat = best_temperatures(target, drafter, some, Warper(0.7), max_new_tokens=5, seed=6)
    assert drawn == [([[n, n]], [n], 6, 0.7, 5) for n in (4, 7)]
    assert heat is not None
    assert heat.factors_D == (TRIED[4],) * 2
    assert heat.gain_D == pytest.approx([32 / 16, 32 / 8])


def test_several_drafts_in_a_tree_have_none(target: Backbone) -> None:
    ensemble = join([make_drafter(target, draft_length=2, seed=seed) for seed in (1, 2)])
    assert best_temperatures(target, ensemble, REQUESTS[:1], Warper(1.0), **HOW) is None


@pytest.mark.slow
def test_a_tempered_chain_is_predicted_as_decoding_it_measures(target: Backbone) -> None:
    """tau of the best factors, foretold from a chain without them and from decoding with them."""

    def load(values: Mapping[str, str]) -> DraftModel:
        length, factors = int(values["eval.draft_length"]), json.loads(values.get(FACTORS, "[]"))
        drafter = sure(target, 1.5, draft_length=length, factors=factors)
        for parameter in drafter.module.parameters():  # too sure, and not right all the time
            parameter.data.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
        return drafter

    grid = Grid("eval.draft_length", (1, 2, 3), fixed=BY_MODEL[0].fixed)
    config = EvalConfig(max_new_tokens=48, repeats=1)
    costs = Costs(0.001, None, {k: 1 + 0.1 * k for k in range(1, 9)})  # what a call takes is none of acceptance

    def predicted(loader: Any, grids: tuple[Grid, ...], *, own: bool) -> list[Any]:
        contender = Contender("draft", "draft", grids, own, loader)
        return predict(Bench(target, REQUESTS, config, 1.0, costs), contender)

    both = predicted(load, (grid,), own=False)
    plain = [each for each in both if each.setting.values[FACTORS] == "[]"]
    tempered = [each for each in both if each.setting.values[FACTORS] != "[]"]
    assert [each.setting.values["eval.draft_length"] for each in tempered] == ["1", "2", "3"]
    assert "times the temperature" in tempered[-1].setting.label
    assert "times the temperature" not in plain[-1].setting.label
    for before, after in zip(plain, tempered, strict=True):
        assert after.tau > before.tau * 1.02
    (measured,) = predicted(lambda _: load(tempered[-1].setting.values), (), own=True)
    assert tempered[-1].tau == pytest.approx(measured.tau, rel=0.06)
    assert all(
        each.setting.values.get(FACTORS, "[]") == "[]"
        for each in predict(
            Bench(target, REQUESTS[:2], config, 0.0, costs), Contender("draft", "draft", (grid,), False, load)
        )
    )
