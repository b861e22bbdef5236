"""Calls are timed in turns."""

import gc

import pytest
import torch
from draftsmith.eval.measure import timing

CPU = torch.device("cpu")


def test_arms_take_turns_and_the_first_round_counts_for_nothing() -> None:
    order: list[str] = []
    arms = {name: lambda name=name: order.append(name) for name in "ab"}
    result = timing.interleaved(arms, 2, device=CPU, repeats=3)
    assert order == [*"aaabbb"] * 3
    assert set(result) == {"a", "b"}


def test_a_turn_is_divided_by_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that says how long each call took: 100 s to warm up, then 3, 6 and 9 s."""
    clock = [0.0]
    took = iter([*[100.0] * 3, *[3.0] * 3, *[6.0] * 3, *[9.0] * 3])

    def call() -> None:
        clock[0] += next(took)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    assert timing.interleaved({"a": call}, 3, device=CPU, repeats=3) == {"a": 6.0}


def test_old_objects_are_not_searched_while_arms_are_timed() -> None:
    found: list[int] = []
    timing.interleaved({"a": lambda: found.append(gc.get_freeze_count())}, 1, device=CPU)
    assert min(found) > 10_000, "what was there before can still be collected in somebody's turn"
    assert gc.get_freeze_count() == 0
