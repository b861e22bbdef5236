"""Edges of what is tuned: which grids are tried at T = 0, where a surface meets 1, and which setting is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draftsmith.drafters.grids import BY_MODEL
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.speed import Costs
from draftsmith.eval.tune import profile
from draftsmith.eval.tune.profile import TRIED, Bench, Measured, Overlaps
from draftsmith.eval.tune.settings import CUT, Contender, DraftSetting, Prediction
from draftsmith.eval.tune.surfaces import Surface

NOTHING: Any = None


def test_at_no_temperature_there_is_no_grid_that_is_only_sampled() -> None:
    contender = Contender("m", "M", BY_MODEL, own=False, load=NOTHING)
    assert contender.grids_at(0.1) == list(BY_MODEL)
    (greedy,) = contender.grids_at(0.0)
    assert greedy == BY_MODEL[0].greedy()
    assert greedy != BY_MODEL[0]


@pytest.mark.parametrize(
    ("speeds", "crosses"),
    [((1.0, 0.5), [0.0]), ((0.5, 1.0), [1.0]), ((1.0, 1.5), []), ((0.99, 0.5), []), ((1.5, 0.5), [0.5])],
)
def test_a_setting_that_is_level_with_plain_decoding_is_at_a_crossing(
    speeds: tuple[float, float], crosses: list[float]
) -> None:
    made = Surface("m", "M", "temperature", ((0.0, speeds[0]), (1.0, speeds[1])))
    assert made.crossings() == crosses


def test_the_best_setting_is_tried_with_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stands; one that has no sizes to be cut to is not decoded again."""
    asked: list[Any] = []

    def decoded(_bench: Any, _contender: Any, values: list[dict[str, str]], sizes: Any) -> list[Measured]:
        asked.append((values, list(sizes)))
        return [Measured(size, 2.0, 2.0, 3.0, 0.02, 0.01, np.zeros(2)) for size in sizes]

    monkeypatch.setattr(profile, "_decoded", decoded)
    contender = Contender("m", "M", BY_MODEL, own=False, load=NOTHING, cuts=(16, 8))
    speeds = {"1": 1.1, "3": 1.4, "5": 1.2}
    whole = [
        Prediction(DraftSetting(contender, {"eval.draft_length": n}), 2.0, 3.0, 0.1, speed, None)
        for n, speed in speeds.items()
    ]
    bench = Bench(NOTHING, [], EvalConfig(), 0.0, Costs(0.01, None, {2: 1.2}))
    made = profile._cut(bench, contender, whole)
    values = [{"eval.draft_length": "3", CUT: "16"}, {"eval.draft_length": "3", CUT: "8"}]
    assert asked == [(values, [16, 8])]
    assert [each.setting.values for each in made] == values
    assert made[0].speedup == pytest.approx(2.0 * 0.01 / 0.02)
    assert profile._cut(bench, Contender("m", "M", [], own=True, load=NOTHING), whole) == []
    assert len(asked) == 1


def test_thirty_judged_tokens_are_enough_for_a_factor() -> None:
    """The first depth has 30, the second 29: that one takes the factor above it, and gains nothing."""
    seen = Overlaps(2)
    own, best, other = (TRIED.index(each) for each in (1.0, 0.8, 1.25))
    seen.sums_DF[:, own] = 10.0
    seen.sums_DF[0, best], seen.sums_DF[1, other] = 12.0, 15.0
    seen.judged_D[:] = 30, 29
    heat = seen.best()
    assert heat.factors_D == (0.8, 0.8)
    assert heat.gain_D == pytest.approx([1.2, 1.0])
    seen.judged_D[1] = 30
    assert (seen.best().factors_D, seen.best().gain_D.tolist()) == ((0.8, 1.25), pytest.approx([1.2, 1.5]))
