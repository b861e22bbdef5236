"""The second prompt set: what it measures, and when two sets are said to differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import make_drafter
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure import second
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.metrics import Counts, acceptance, ratio
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.measure.rounds import decode
from draftsmith.eval.measure.second import difference, second_rows

CONFIG = EvalConfig(max_new_tokens=20, temperatures=[0.0, 1.0], repeats=1, second_prompts="others")


def requests(first: int, count: int) -> list[Request]:
    return [Request(Prompt(str(n), "all", (), chat=False), [n + 1, n + 2], n) for n in range(first, first + count)]


@pytest.mark.parametrize("batch", [1, 3])
def test_it_is_measured_as_the_first_set_is(target: Backbone, batch: int) -> None:
    """The same tau as a whole evaluation of those prompts, whatever is decoded together."""
    arm = Arm("draft", make_drafter(target), "lossless")
    other = requests(20, 5)
    first = [{"method": "draft", "temperature": t, "tau": [2.0, 1.8, 2.2]} for t in (0.0, 1.0)]
    made = second_rows(target, [arm], other, CONFIG.model_copy(update={"batch": batch}), first)
    for row, temperature in zip(made, (0.0, 1.0), strict=True):
        (run,) = decode(target, [(arm, None)], other, CONFIG, temperature)
        expected = acceptance(run.counts, seed=CONFIG.seed)
        assert row["tau"] == expected.tau.to_list()
        assert row["alpha"] == expected.alpha.to_list()
        assert (row["requests"], row["verdict"], row["prompts"]) == (5, "lossless", "others")
        assert row["difference"] == difference(row["tau"], [2.0, 1.8, 2.2], rows=2)


@pytest.mark.parametrize(
    ("one", "other", "holds"),
    [
        ([2.0, 1.9, 2.1], [2.0, 1.9, 2.1], True),
        ([2.0, 1.9, 2.1], [2.13, 2.03, 2.23], True),  # root of the sum of squares: 0.14
        ([2.0, 1.9, 2.1], [2.15, 2.05, 2.25], False),
        ([2.0, 1.99, 2.3], [2.2, 2.1, 2.21], True),  # the ends that face each other count
        ([2.0, 1.7, 2.01], [2.2, 2.19, 2.5], False),
    ],
)
def test_the_interval_of_a_difference(one: list[float], other: list[float], holds: bool) -> None:
    value, low, high = difference(one, other, rows=1)
    assert value == pytest.approx(one[0] - other[0])
    assert low is not None
    assert high is not None
    assert (low <= 0 <= high) is holds
    wide: Any = difference(one, other, rows=4)
    assert wide[1] < low
    assert wide[2] > high


def test_without_an_interval_there_is_no_verdict() -> None:
    assert difference([None, None, None], [2.0, 1.9, 2.1], rows=1) == [None, None, None]
    assert difference([2.5, None, None], [2.0, 1.9, 2.1], rows=1) == [0.5, None, None]


def test_sets_of_one_kind_differ_as_rarely_as_is_said() -> None:
    """Few of 200 pairs that are alike (a bootstrap of 24 is a little narrow), nearly all of 200 that are not."""
    g = np.random.default_rng(0)

    def tau(rate: float) -> list[float | None]:
        steps = g.integers(10, 30, 24).astype(float)
        return ratio(g.poisson(rate * steps).astype(float), steps, resamples=300).to_list()

    def apart(one: float, other: float) -> float:
        found = [difference(tau(one), tau(other), rows=1) for _ in range(200)]
        return float(np.mean([not (low <= 0 <= high) for _, low, high in found]))  # type: ignore[operator]

    assert apart(2.0, 2.0) < 0.15
    assert apart(2.0, 2.6) > 0.9


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        # below is made of one's lower half and the other's upper one, above the other way round
        ([2.2, 2.19, 2.5], [2.0, 1.7, 2.01], [0.2, 0.18586, 0.62426]),
        ([2.2, 2.1, 2.21], [2.0, 1.99, 2.3], [0.2, -0.11623, 0.21414]),
    ],
)
def test_the_ends_of_a_difference_by_hand(one: list[float], other: list[float], expected: list[float]) -> None:
    assert difference(one, other, rows=1) == pytest.approx(expected, abs=1e-5)


def test_the_intervals_of_a_table_hold_for_all_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods at two temperatures are four rows, whichever of them is read."""
    none_D = np.zeros(1)
    counts = [Counts(2, emitted, 0, none_D, none_D, none_D) for emitted in (4, 5, 6)]
    monkeypatch.setattr(second, "_decoded", lambda *_: counts)
    arms: Any = [Arm("a", Any), Arm("b", Any)]  # type: ignore[arg-type]
    first = [{"method": name, "temperature": t, "tau": [2.0, 1.8, 2.2]} for name in "ab" for t in (0.0, 1.0)]
    made = second_rows(Any, arms, [], CONFIG, first)  # type: ignore[arg-type]
    assert [(row["method"], row["temperature"]) for row in made] == [("a", 0.0), ("b", 0.0), ("a", 1.0), ("b", 1.0)]
    for row in made:
        assert row["tau"][0] == 2.5
        assert row["difference"] == difference(row["tau"], [2.0, 1.8, 2.2], rows=4)
