"""Predictions against cases worked out by hand: several rows at a time, answers of unlike length, rows that ended."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.grids import BY_MODEL, Grid
from draftsmith.drafters.temperatures import FACTORS
from draftsmith.errors import RequestError
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.rounds import AllRounds
from draftsmith.eval.measure.speed import Costs
from draftsmith.eval.tune import profile
from draftsmith.eval.tune.profile import Bench, Heat, Measured, between, costs_of, heated, pays_from, predict
from draftsmith.eval.tune.settings import Contender, Prediction
from helpers.runs.planned_runs import counts_of, drafter_of, requests_of, run_of

COSTS = Costs(0.010, None, {k: 1 + 0.1 * k for k in range(1, 9)})
"""A call of ten milliseconds; each node more costs a tenth of it."""


def two_rows() -> AllRounds:
    """Batches of two rows, one of which ends early: 18 tokens in 6 calls, plain decoding 20 in 0.3 s.

    The machine was slow in the third turn of three.
    """
    return run_of(
        [counts_of(3, [2, 1]), counts_of(2, [2, 2])],
        seconds_G=[0.3, 0.15],
        tokens_G=[10, 8],
        baseline_seconds_G=[0.2, 0.1],
        baseline_tokens_G=[12, 8],
        target_calls=6,
        baseline_calls=15,
        step_costs=[4.0, 4.2, 30.0],
        nodes=21,
    )


def test_what_a_run_has_measured() -> None:
    """By hand, and no two numbers of it alike: tau is of the steps of a row, tokens a step of all rows together."""
    made = Measured.of(2, two_rows())
    assert made.size == 2
    assert made.tau == pytest.approx(12 / 5)
    assert made.tokens_per_step == pytest.approx(18 / 6)
    assert made.nodes == pytest.approx(21 / 6)
    assert made.step_seconds == pytest.approx(4.2 * 0.3 / 15), "the middle one of the turns"
    assert made.token_seconds == pytest.approx(0.3 / 20)
    assert made.accepted_D == pytest.approx([4 / 5, 3 / 5])
    empty = run_of([counts_of(0, [0, 0])], seconds_G=0.1, tokens_G=1, target_calls=1)
    with pytest.raises(RequestError, match="no step of the prompts for predictions can be counted"):
        Measured.of(2, empty)


def chain(size: int, *, rows: float = 1.6, draft: float = 0.002, around: float = 0.003) -> Measured:
    """A batch of two of which `rows` run on average; beside a call a step takes `draft` a token, and `around`."""
    accepted_D = np.array([0.8, 0.5, 0.3, 0.2][:size])
    tau = 1 + float(accepted_D.sum())
    seconds = 0.010 * (1 + 0.1 * size) + draft * size + around
    return Measured(size, tau, tau * rows, size + 1, seconds, (0.010 + around) / rows, accepted_D)


@pytest.mark.parametrize(("draft", "pays"), [(0.008, False), (0.0001, True)])
@pytest.mark.parametrize("rows", [1.0, 1.6, 4.0])
def test_break_even_of_several_rows_is_where_both_take_the_same_time(rows: float, draft: float, *, pays: bool) -> None:
    """A row's tokens cost both ways the same, at a call so many times as long; below 1 where it pays already."""
    growth = pays_from(chain(2, rows=rows, draft=draft), COSTS)
    assert growth is not None
    call = 0.010 * growth
    plain = (call + 0.003) / rows
    speculative = (call * 1.2 + 2 * draft + 0.003) / (2.3 * rows)
    if pays:
        assert growth == 0.0
        assert speculative < plain
    else:
        assert growth > 1
        assert speculative == pytest.approx(plain)


def test_break_even_below_one_is_told_from_one_at_any_cost() -> None:
    """The rest takes 12 ms of a step, plain decoding has 3 ms around: (0.012 - 2.3 * 0.003) / (0.010 * 1.1)."""
    growth = pays_from(chain(2, draft=0.0045), COSTS)
    assert growth == pytest.approx((0.012 - 2.3 * 0.003) / (0.010 * (2.3 - 1.2)))
    assert 0 < growth < 1  # type: ignore[operator]
    level = chain(2)
    assert pays_from(Measured(2, 1.2, 1.92, 3, 0.02, 0.011, level.accepted_D), COSTS) is None, "tau as c_v"


def test_warmer_draws_gain_at_every_depth_behind() -> None:
    """A token more often accepted at depth 1 lets depth 2 be reached more often too; nothing beyond certainty."""
    before = Measured(3, 2.4, 3.6, 4, 0.03, 0.01, np.array([0.8, 0.4, 0.2]))
    after = heated(before, Heat((1.1, 1.1, 1.1), np.array([1.1, 1.25, 1.0])))
    assert after.accepted_D == pytest.approx([0.88, 0.4 * 1.375, 0.2 * 1.375])
    assert after.tau == pytest.approx(2.4 + 0.08 + 0.15 + 0.075)
    assert after.tokens_per_step == pytest.approx(3.6 * after.tau / 2.4)
    assert (after.nodes, after.step_seconds, after.token_seconds) == (4, 0.03, 0.01)
    certain = heated(before, Heat((1.1, 1.1, 1.1), np.array([1.5, 1.0, 1.0])))
    assert certain.accepted_D == pytest.approx([1.0, 0.6, 0.3])
    short = heated(Measured(1, 1.8, 1.8, 2, 0.03, 0.01, np.array([0.8])), Heat((1.1, 1.1), np.array([1.1, 9.0])))
    assert short.tau == pytest.approx(1.88), "the gain of a depth that it does not have"


def test_calls_are_timed_at_the_batch_and_context_that_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(profile, "measure_costs", lambda *args, **how: asked.append((args, how)))
    target: Any = drafter_of(0)
    target.context = 1000
    requests = requests_of([10, 30, 80])
    config = EvalConfig(batch=3, max_new_tokens=48)
    costs_of(target, requests, config)
    target.context = 100
    costs_of(target, requests, config)
    (long_args, long_how), (_, short_how) = asked
    assert long_args[:2] == (target, None)
    assert long_args[2][0] == 1
    assert long_args[2][-1] >= 61, "the largest tree of a grid"
    assert long_how == {"context": 30 + 24, "rows": 3, "text": [1] * 10 + [2] * 30 + [3] * 80}
    assert short_how["context"] == 100 - 61 - 1


class Planned:
    """Chains whose every step is planned, in place of decoding; a setting's values say how long it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batch: int = 2) -> None:
        self.config = EvalConfig(batch=batch, max_new_tokens=48, seed=5)
        self.requests = requests_of([4] * 8)
        self.decoded: list[tuple[list[int], float]] = []
        monkeypatch.setattr(profile, "decode", self.decode)

    def decode(self, target: Any, arms: Any, requests: Any, config: EvalConfig, temperature: float) -> list[AllRounds]:
        assert (requests, config) == (self.requests, self.config)
        assert all(length is None for _, length in arms)
        lengths = [arm.drafter.draft_length for arm, _ in arms]
        self.decoded.append((lengths, temperature))
        return [self.run(length) for length in lengths]

    @staticmethod
    def run(size: int) -> AllRounds:
        """`chain(size)`, as ten steps of each of two rows would have it, of which 1.6 run on average."""
        own = chain(size)
        passed = [8, 5, 3, 2][:size]
        return run_of(
            [counts_of(10, passed)] * 2,
            seconds_G=own.step_seconds * 10,
            tokens_G=own.tokens_per_step * 10,
            baseline_seconds_G=own.token_seconds * 40,
            baseline_tokens_G=40.0,
            target_calls=10,
            baseline_calls=25,
            step_costs=[own.step_seconds / (1.6 * own.token_seconds)],
            nodes=10 * (size + 1),
        )

    def predicted(self, grids: Any, *, own: bool = False, temperature: float = 0.0) -> list[Prediction]:
        contender = Contender("d", "D", grids, own, lambda values: drafter_of(int(values.get("eval.draft_length", 1))))
        bench = Bench(None, self.requests, self.config, temperature, COSTS)  # type: ignore[arg-type]
        return predict(bench, contender)


def test_every_setting_of_a_grid_is_predicted_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sizes are decoded, the others lie between them; all numbers are those of the planned step."""
    planned = Planned(monkeypatch)
    made = planned.predicted((Grid("eval.draft_length", (1, 2, 3, 4)),), temperature=0.7)
    assert planned.decoded == [([1, 3, 4], 0.7)]
    assert [each.setting.values["eval.draft_length"] for each in made] == ["1", "2", "3", "4"]
    for size, each in enumerate(made, start=1):
        own = chain(size)
        assert each.tau == pytest.approx(own.tau)
        assert each.nodes == pytest.approx(size + 1)
        assert each.proposing == pytest.approx((0.002 * size + 0.003) / 0.010)
        step, token = 0.010 * (1 + 0.1 * size) + 0.002 * size + 0.003, 0.013 / 1.6
        assert each.speedup == pytest.approx(own.tau * 1.6 * token / step)
        assert each.pays_from == pytest.approx(pays_from(own, COSTS))


def test_what_is_loaded_is_predicted_first_where_it_stands_in_no_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(monkeypatch)
    own, *others = planned.predicted((Grid("eval.draft_length", (1, 2, 4)),), own=True)
    assert own.setting.values == {}
    assert own.tau == pytest.approx(chain(1).tau)
    assert own.speedup == others[0].speedup
    assert len(others) == 3


def test_draft_temperatures_are_tried_where_tokens_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the longest chain, under the warper that decodes; none where the best factors are the target's own."""
    planned = Planned(monkeypatch)
    heat = Heat((1.0, 1.2, 1.2, 1.2), np.array([1.0, 1.1, 1.0, 1.0]))
    asked: list[Any] = []

    def best(target: Any, drafter: Any, requests: Any, warper: Warper, **how: Any) -> Heat:
        asked.append((drafter.draft_length, requests, warper, how))
        return heat

    monkeypatch.setattr(profile, "best_temperatures", best)
    drawn = Grid("eval.draft_length", (1, 2, 4), fixed=BY_MODEL[0].fixed)
    made = planned.predicted((drawn,), temperature=0.7)
    assert asked == [(4, planned.requests, Warper.of(planned.config, 0.7), {"max_new_tokens": 48, "seed": 5})]
    plain, warm = made[:3], made[3:]
    # a chain of one has factor 1 alone, which it had already
    assert [(each.setting.values["eval.draft_length"], json.loads(each.setting.values[FACTORS])) for each in warm] == [
        ("2", [1.0, 1.2]),
        ("4", [1.0, 1.2]),
    ]
    assert warm[0].tau == pytest.approx(2.3 + 0.05)
    assert warm[1].tau == pytest.approx(2.8 + 0.05 + 0.03 + 0.02)
    assert warm[0].speedup == pytest.approx(plain[1].speedup * 2.35 / 2.3)
    assert len(planned.predicted((drawn,), temperature=0.0)) == 3
    assert (
        len(planned.predicted((Grid("eval.draft_length", (1, 2, 4), fixed=BY_MODEL[1].fixed),), temperature=0.7)) == 3
    )
    assert len(asked) == 1


def test_a_tree_between_measured_ones() -> None:
    """tau over the logarithm of the nodes; everything else on a line over the size."""
    small = Measured(2, 2.0, 3.0, 3, 0.020, 0.008, np.array([0.6, 0.4]))
    large = Measured(8, 3.0, 3.0, 9, 0.030, 0.006, np.array([0.8, 0.7]))
    made = between([small, large], 4, False, COSTS)
    assert made.size == 4
    assert made.tau == pytest.approx(2.5)
    assert made.tokens_per_step == pytest.approx(2.5 * (1.5 + (1.0 - 1.5) / 3))
    assert made.nodes == pytest.approx(5)
    assert made.token_seconds == pytest.approx(0.008 - 0.002 / 3)
    rest = (0.020 - 0.012, 0.030 - 0.018)
    assert made.step_seconds == pytest.approx(0.014 + rest[0] + (rest[1] - rest[0]) / 3)
    assert between([small, large], 8, False, COSTS) is large


def test_a_longer_chain_begins_behind_more_corrections() -> None:
    """The shorter one accepted less at its depths than the longer one did there: the difference fades out between."""
    short = Measured(1, 1.7, 1.7, 2, 0.02, 0.01, np.array([0.7]))
    long = Measured(3, 2.5, 2.5, 4, 0.03, 0.01, np.array([0.8, 0.4, 0.3]))
    longest = Measured(6, 3.5, 3.5, 7, 0.04, 0.01, np.array([0.9, 0.6, 0.4, 0.3, 0.2, 0.1]))
    for points in ([short, long], [short, long, longest]):
        made = between(points, 2, True, COSTS)
        assert made.tau == pytest.approx(2.2 * (1.7 / 1.8 + 1.0) / 2)
    assert between([short, long], 2, True, COSTS).accepted_D == pytest.approx([0.8, 0.4])
