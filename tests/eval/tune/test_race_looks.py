"""The race on planned runs: which prompts each look adds, how sure its intervals are, who is left behind and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.metrics import Interval
from draftsmith.eval.measure.rounds import AllRounds
from draftsmith.eval.tune import race as racing
from draftsmith.eval.tune.race import Raced, race
from draftsmith.eval.tune.settings import Contender, DraftSetting, Prediction
from helpers.runs.planned_runs import counts_of, drafter_of, requests_of, run_of

CONFIG = EvalConfig(batch=2, max_new_tokens=24, seed=3)


def promised(name: str, speedup: float = 1.0) -> Prediction:
    contender = Contender(name, name, (), True, lambda _values: drafter_of(3))
    return Prediction(DraftSetting(contender, {}), 2.0, 4.0, 1.0, speedup, None)


class Planned:
    """Settings that are so many times as fast in every batch, and intervals of a planned width."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, speeds: dict[str, float], width: float = 0.2) -> None:
        self.speeds, self.width = speeds, width
        self.decoded: list[tuple[list[str], list[int]]] = []
        self.levels: list[tuple[float, int]] = []
        monkeypatch.setattr(racing, "decode", self.decode)
        monkeypatch.setattr(racing, "speed_interval", self.interval)

    def decode(
        self, target: Any, arms: Sequence[Any], requests: Any, config: Any, temperature: float
    ) -> list[AllRounds]:
        assert (config, temperature) == (CONFIG, 0.5)
        assert all(length is None for _, length in arms)
        self.decoded.append(([arm.name for arm, _ in arms], [each.number for each in requests]))
        return [
            run_of(
                [counts_of(4, [3, number]) for number in range(len(requests))],
                seconds_G=[1.0] * 2,
                tokens_G=[10.0] * 2,
                baseline_seconds_G=[self.speeds[arm.name]] * 2,
                baseline_tokens_G=[10.0] * 2,
            )
            for arm, _ in arms
        ]

    def interval(self, run: AllRounds, seed: int, *, level: float, resamples: int) -> Interval:
        assert seed == CONFIG.seed
        self.levels.append((level, resamples))
        speed = sum(run.baseline_seconds_G) / sum(run.seconds_G)
        return Interval(speed, speed - self.width, speed + self.width)

    def race(self, count: int = 40) -> list[Raced]:
        predictions = [promised(name, 1.0 + at / 10) for at, name in enumerate(self.speeds)]
        return race(None, predictions, requests_of([3] * count), CONFIG, 0.5)  # type: ignore[arg-type]


def test_looks_add_prompts_and_share_the_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 batches of two: looks behind 6, 12 and 20 of them, three settings, so nine intervals hold together."""
    planned = Planned(monkeypatch, {"a": 1.2, "b": 1.3, "c": 1.25})
    done = planned.race()
    names = ["a", "b", "c"]
    assert planned.decoded == [(names, list(range(12))), (names, list(range(12, 24))), (names, list(range(24, 40)))]
    assert {level for level, _ in planned.levels} == {1 - 0.05 / 9}
    assert min(resamples for _, resamples in planned.levels) >= 10_000, "the ends of such intervals are rare"
    assert [each.requests for each in done] == [40] * 3


def test_what_fell_behind_is_decoded_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is told with the prompts that it had; of the others measuring ends when one is left that pays."""
    planned = Planned(monkeypatch, {"a": 1.7, "b": 1.0, "c": 1.4})
    done = planned.race()
    assert [names for names, _ in planned.decoded] == [["a", "b", "c"], ["a", "c"], ["a", "c"]]
    assert [(each.prediction.setting.label, each.requests) for each in done] == [("a", 40), ("c", 40), ("b", 12)]
    assert done[-1].speedup.value == pytest.approx(1.0)
    alone = Planned(monkeypatch, {"a": 1.7, "b": 1.0})
    assert [each.requests for each in alone.race()] == [12, 12]
    slow = Planned(monkeypatch, {"a": 0.7, "b": 0.75})
    assert [each.requests for each in slow.race()] == [12, 12], "none can pay any more"
    level = Planned(monkeypatch, {"a": 1.1, "b": 0.75})
    assert [each.requests for each in level.race()] == [40, 40], "1 lies in an interval"


def test_an_odd_rest_is_decoded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(monkeypatch, {"a": 1.1})
    done = planned.race(15)
    assert [numbers for _, numbers in planned.decoded] == [list(range(12)), [12, 13, 14]]
    assert {level for level, _ in planned.levels} == {1 - 0.05 / 2}
    assert done[0].requests == 15
    # tau of all requests, by their own counts: 4 steps each, 3 + number accepted, numbers from 0 in each look
    emitted = [4 + 3 + n for n in (*range(12), *range(3))]
    assert done[0].tau.value == pytest.approx(sum(emitted) / (4 * 15))
