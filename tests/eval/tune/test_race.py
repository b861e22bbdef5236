"""When measuring ends, and that what is slower by much does not win."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
from conftest import make_drafter
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.metrics import Interval, acceptance
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.measure.rounds import decode
from draftsmith.eval.tune.race import Raced, best_first, is_behind, is_decided, looks_at, race
from draftsmith.eval.tune.settings import Contender, DraftSetting, Prediction


def raced(low: float, high: float) -> Raced:
    middle = (low + high) / 2
    return Raced(None, Interval(middle, low, high), Interval(2.0, 1.9, 2.1), 8)  # type: ignore[arg-type]


def test_behind_is_below_anothers_interval() -> None:
    leader, near, far = raced(1.3, 1.5), raced(1.2, 1.4), raced(1.0, 1.29)
    assert not is_behind(near, [leader, near, far])
    assert is_behind(far, [leader, near, far])
    assert not is_behind(leader, [leader, near, far])


@pytest.mark.parametrize(
    ("left", "decided"),
    [
        ([raced(1.1, 1.3)], True),
        ([raced(0.9, 1.1)], False),
        ([raced(1.1, 1.3), raced(1.2, 1.4)], False),
        ([raced(0.7, 0.9), raced(0.8, 0.99)], True),
        ([raced(0.7, 0.9), raced(0.8, 1.01)], False),
    ],
)
def test_decided(left: list[Raced], decided: bool) -> None:
    assert is_decided(left) is decided


@pytest.mark.parametrize(
    ("batches", "looks"), [(6, [6]), (7, [6, 7]), (12, [6, 12]), (24, [6, 12, 24]), (30, [6, 12, 24, 30]), (3, [3])]
)
def test_looks_are_few(batches: int, looks: list[int]) -> None:
    assert looks_at(batches) == looks


def test_prediction_and_measurement_choose_between_settings_that_measure_level() -> None:
    def of(method: str, promised: float, low: float, high: float) -> Raced:
        setting = DraftSetting(
            Contender(method, method, (), True, lambda _values: None), {"draft_length": str(promised)}
        )  # type: ignore[arg-type, return-value]
        prediction = Prediction(setting, 2.0, 5.0, 1.0, promised, None)
        return Raced(prediction, Interval((low + high) / 2, low, high), Interval(2.0, 1.9, 2.1), 8)

    other = of("lookup", 1.9, 1.4, 1.7)
    faster, level, behind = of("eagle", 1.6, 1.3, 1.7), of("eagle", 1.7, 1.2, 1.7), of("eagle", 1.8, 1.0, 1.25)
    assert best_first([behind, other, level, faster]) == [other, level, faster, behind]
    # a measurement that says more than the prediction is not overruled by it
    shorter, longer = of("eagle", 1.34, 1.26, 1.46), of("eagle", 1.31, 1.40, 1.66)
    assert best_first([shorter, longer]) == [longer, shorter]


class Slow(DraftModel):
    """Drafts alike, and sleeps before it."""

    def propose(self, *args: Any) -> Any:
        time.sleep(0.02)
        return super().propose(*args)


@pytest.mark.slow
def test_the_slower_of_two_equal_drafters_is_left_behind(target: Backbone) -> None:
    quick = make_drafter(target)

    def loads(slow: bool) -> Any:
        def load(_values: Mapping[str, str]) -> DraftModel:
            return Slow(quick.backbone, target.vocabulary) if slow else quick

        return load

    promised = [
        Prediction(DraftSetting(Contender(name, name, (), True, loads(name == "slow")), {}), 2.0, 5.0, 1.0, 9.0, None)
        for name in ("slow", "quick")
    ]
    requests = [Request(Prompt(str(n), "all", (), chat=False), [n + 1, n + 2], n) for n in range(40)]
    config = EvalConfig(max_new_tokens=24, repeats=1)
    done = race(target, promised, requests, config, 0.0)
    assert [each.prediction.setting.label for each in done] == ["quick", "slow"]
    assert done[1].requests < len(requests)
    (same,) = decode(target, [(Arm("quick", quick), None)], requests[: done[1].requests], config, 0.0)
    assert done[1].tau.value == acceptance(same.counts, seed=config.seed).tau.value
    assert not done[1].pays
