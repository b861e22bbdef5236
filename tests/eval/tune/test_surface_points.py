"""Surfaces on planned clocks: every point worked out by hand, at batches and contexts whose steps differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.tune import surfaces
from draftsmith.eval.tune.settings import Contender, DraftSetting, Prediction
from draftsmith.eval.tune.surfaces import Surface, measured_surfaces
from helpers.runs.planned_runs import drafter_of, requests_of

CONFIG = EvalConfig(batch=2, max_new_tokens=40, seed=9)
REQUESTS = requests_of([3, 5, 4], first=6)
TAUS = {0.0: 2.0, 0.5: 1.5, 1.0: 1.25}


class Clock:
    """A plain step takes 10 + 2 a row + a hundredth of a token of context, a speculative one twice the first, thrice
    the second; a slow moment hits the first round of both by unlike factors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain: list[tuple[list[list[int]], dict[str, Any]]] = []
        self.own: list[tuple[list[list[int]], dict[str, Any]]] = []
        monkeypatch.setattr(surfaces, "autoregressive", self.autoregressive)
        monkeypatch.setattr(surfaces, "generate", self.generate)
        monkeypatch.setattr(surfaces, "tau", lambda logs: float(np.mean([TAUS[log] for log in logs])))

    def autoregressive(self, target: Any, ids: list[list[int]], **how: Any) -> Any:
        self.plain.append((ids, how))
        slow = 1 + 3 * (len(self.plain) % 2)
        return SimpleNamespace(decode_seconds=11 * slow * self.step(ids, 10, 2), target_calls=11)

    def generate(self, target: Any, drafter: Any, ids: list[list[int]], **how: Any) -> Any:
        self.own.append((ids, how))
        slow = 1 + 0.5 * (len(self.own) % 2)
        return SimpleNamespace(
            decode_seconds=5 * slow * self.step(ids, 20, 6), target_calls=5, steps=how["warper"].temperature
        )

    @staticmethod
    def step(ids: list[list[int]], alone: float, row: float) -> float:
        return alone + row * len(ids) + 0.01 * max(map(len, ids))


def ratio(rows: int, longest: int) -> float:
    return (10 + 2 * rows + 0.01 * longest) / (20 + 6 * rows + 0.01 * longest)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def made_of(context: int, length: int = 3, nodes: int = 4) -> list[Surface]:
    target: Any = SimpleNamespace(context=context, eos_ids=(2,), device=torch.device("cpu"))
    contender = Contender("d", "D", (), True, lambda values: drafter_of(length, nodes))
    best = Prediction(DraftSetting(contender, {}), 2.5, 4.0, 1.0, 1.2, None)
    return list(measured_surfaces(target, [best], REQUESTS, CONFIG, 0.5))


def test_points_are_what_steps_take(clock: Clock) -> None:
    batch, context, temperature = made_of(600)
    assert [each.axis for each in (batch, context, temperature)] == ["batch", "context", "temperature"]
    assert {(each.method, each.label) for each in (batch, context, temperature)} == {("d", "D")}
    # prompts of 3, 5 and 4 tokens, over and over
    longest = {1: 3, 2: 5, 4: 5, 8: 5}
    assert batch.points == tuple((rows, pytest.approx(2.5 * ratio(rows, longest[rows]))) for rows in (1, 2, 4, 8))
    assert context.points == tuple((long, pytest.approx(2.5 * ratio(2, long))) for long in (32, 128, 512))
    assert temperature.points == tuple((T, pytest.approx(TAUS[T] * ratio(2, 5))) for T in (0.0, 0.5, 1.0))
    assert batch.to_dict()["points"] == [list(point) for point in batch.points]


def test_both_decode_the_same_under_the_warper_that_was_tuned_for(clock: Clock) -> None:
    made_of(600)
    for ids, how in (*clock.plain, *clock.own):
        # as long for all: an end of text would leave steps of fewer rows
        if "eos_ids" not in how:
            assert (how["warper"], how["max_new_tokens"], how["seed"]) == (Warper(0.5), 12, 9)
            assert all(set(each) <= {7, 8, 9} for each in ids)
    timed = [ids for ids, how in clock.own if "eos_ids" not in how]
    assert timed == [ids for ids, _ in clock.plain]
    assert {len(ids) for ids in timed} == {1, 2, 4, 8}
    warm = [(ids, how) for ids, how in clock.own if "eos_ids" in how]
    assert [how["warper"] for _, how in warm] == [Warper(T) for T in (0.0, 0.5, 1.0)]
    for ids, how in warm:
        assert ids == [each.ids for each in REQUESTS]
        assert (how["eos_ids"], how["requests"], how["seed"], how["max_new_tokens"]) == ((2,), [6, 7, 8], 9, 40)


def test_texts_of_a_context_are_the_prompts_own_and_as_many_as_the_batch(clock: Clock) -> None:
    made_of(600)
    long = [ids for ids, how in clock.plain if len(ids[0]) == 32]
    assert len(long) == 2, "two rounds"
    assert long[0] == [([7] * 3 + [8] * 5 + [9] * 4) * 2 + [7] * 3 + [8] * 5] * 2


@pytest.mark.parametrize(("context", "lengths"), [(145, [32, 128]), (144, [32]), (20, [])])
def test_contexts_that_do_not_fit_are_left_out(clock: Clock, context: int, lengths: list[int]) -> None:
    """Beside a context there has to be room for 12 tokens, 4 nodes and the root."""
    _, surface, _ = made_of(context)
    assert [x for x, _ in surface.points] == lengths


def test_answers_are_long_enough_for_a_long_draft(clock: Clock) -> None:
    made_of(600, length=15, nodes=16)
    assert {how["max_new_tokens"] for _, how in clock.plain} == {17}
