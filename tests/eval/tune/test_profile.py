"""Settings between measured ones, against what a step is made of; and a real chain against decoding it."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_drafter
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.grids import Grid
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.measure.speed import Costs
from draftsmith.eval.tune.profile import Bench, Measured, between, costs_of, pays_from, predict
from draftsmith.eval.tune.settings import Contender

COSTS = Costs(0.010, None, {k: 1 + 0.1 * k for k in range(1, 9)})
ACCEPTED = (0.8, 0.5, 0.3, 0.2)


def step(size: int, *, draft: float = 0.002, around: float = 0.001) -> Measured:
    """A chain whose step is a verify call, `draft` seconds a drafted token, and what surrounds them."""
    tau = 1 + sum(ACCEPTED[:size])
    seconds = 0.010 * (1 + 0.1 * size) + draft * size + around
    return Measured(size, tau, tau, size + 1, seconds, 0.010 + around, np.array(ACCEPTED[:size]))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_chain_between_two_measured_ones(size: int) -> None:
    made = between([step(1), step(4)], size, True, COSTS)
    own = step(size)
    assert made.tau == pytest.approx(own.tau)
    assert made.tokens_per_step == pytest.approx(own.tokens_per_step)
    assert made.step_seconds == pytest.approx(own.step_seconds)
    assert made.nodes == pytest.approx(own.nodes)


def test_a_tree_between_two_measured_ones_lies_between_them() -> None:
    small, large = step(1), step(4)
    made = between([small, large], 2, False, COSTS)
    assert made.tau == pytest.approx((small.tau + large.tau) / 2)  # 2 is halfway from 1 to 4 in logarithms


def test_pays_from_is_where_the_speed_up_is_one() -> None:
    """With calls that much slower, and the rest as it is, both ways take the same time for a token."""
    slow = step(2, draft=0.008)
    growth = pays_from(slow, COSTS)
    assert growth is not None
    call, around = 0.010 * growth, 0.001
    assert (call * 1.2 + 2 * 0.008 + around) / slow.tau == pytest.approx(call + around)
    assert growth > 1


def test_what_accepts_less_than_a_wider_call_costs_never_pays() -> None:
    poor = Measured(2, 1.1, 1.1, 3, 0.02, 0.011, np.array([0.1, 0.0]))
    assert pays_from(poor, COSTS) is None


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_chains_of_one_grid_accept_what_decoding_them_does(target: Backbone, temperature: float) -> None:
    """tau of every length, the unmeasured too, against runs of that length on the same prompts.

    A prompt goes other ways with another length, so they agree within what prompts differ by.
    """
    grid = Grid("eval.draft_length", (1, 2, 3, 4, 6))
    contender = Contender(
        "draft",
        "draft",
        (grid,),
        False,
        lambda values: make_drafter(target, draft_length=int(values["eval.draft_length"])),
    )
    config = EvalConfig(max_new_tokens=48, repeats=1)
    requests = [Request(Prompt(str(n), "all", (), chat=False), [n + 1, n + 2, n + 3], n) for n in range(12)]
    bench = Bench(target, requests, config, temperature, costs_of(target, requests, config))
    predicted = predict(bench, contender)
    assert [int(each.setting.values["eval.draft_length"]) for each in predicted] == list(grid.sizes)
    exact = {
        size: predict(
            bench, Contender("draft", "draft", (), True, lambda _, size=size: make_drafter(target, draft_length=size))
        )[0]
        for size in (2, 4)
    }
    for each in predicted:
        size = int(each.setting.values["eval.draft_length"])
        assert each.nodes == pytest.approx(size + 1, rel=0.05)
        if size in exact:
            assert each.tau == pytest.approx(exact[size].tau, rel=0.06)
    assert predicted[-1].tau > predicted[0].tau + 0.3
