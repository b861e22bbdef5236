"""Calls are timed in turns."""

import gc

import pytest
import torch
from conftest import make_target
from draftsmith.eval.measure import timing
from draftsmith.eval.measure.speed import measure_costs
from pretended_cuda.device import PretendedCuda
from pretended_cuda.graphs import Graph

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


def test_turns_end_once_their_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes two seconds by this clock: those that warm up, and as many rounds as begin within the time."""
    clock = [0.0]

    def call() -> None:
        clock[0] += 2.0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    for within, at_least, rounds in ((9.0, 1, 2), (7.9, 1, 1), (0.0, 3, 3), (1000.0, 1, 30)):
        found = timing.turns({"a": call, "b": call}, 30, device=CPU, within=within, at_least=at_least)
        assert found == {name: [2.0] * rounds for name in "ab"}


def test_neighbours_are_compared() -> None:
    """A machine that is three times slower in two rounds of five changes no ratio; that of medians it would."""
    over = [1.0, 1.0, 1.0, 3.0, 3.0]
    of = [1.5, 1.5, 4.5, 4.5, 4.5]
    assert timing.times_as_long(of, over) == 1.5


@pytest.mark.usefixtures("nothing_frozen")
def test_old_objects_are_not_searched_while_arms_are_timed() -> None:
    found: list[int] = []
    arms = {"a": lambda: found.append(gc.get_freeze_count())}
    timing.interleaved(arms, 1, device=CPU)
    assert min(found) > 10_000, "what was there before can still be collected in somebody's turn"
    assert gc.get_freeze_count() == 0
    gc.freeze()
    frozen = gc.get_freeze_count()
    timing.interleaved(arms, 1, device=CPU)
    # what is no longer referred to goes, frozen or not
    assert gc.get_freeze_count() > frozen - 1_000 > 10_000, "what the process itself froze stays so"


def test_calls_on_cuda_are_replayed_as_steps_are(cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[Graph] = []
    monkeypatch.setattr(Graph, "replay", lambda graph: replayed.append(graph))
    target = make_target("qwen3")
    target.model.to("cuda")
    costs = measure_costs(target, None, [2], context=8, rounds=1)
    assert costs.c_v.keys() == {2}
    assert len({*map(id, replayed)}) == 2  # a call of one token, and one that verifies two more
    assert len(replayed) == 2 * (1 + 2 * 2)  # recorded, and two rounds of two calls
    assert timing.enough_tokens(12, target.device) > timing.enough_tokens(12, CPU) == 12
