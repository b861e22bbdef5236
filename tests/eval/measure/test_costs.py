"""Costs and rows of results from planned times: batches above one, unlike lengths, repeats, a GPU's own clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_drafter
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import Generation
from draftsmith.decoding.steps import StepLog
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure import evaluate as evaluating
from draftsmith.eval.measure import metrics, speed, timing
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.metrics import degeneracy
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.measure.rounds import AllRounds, speed_fields
from draftsmith.eval.measure.speed import Costs, bytes_of, measure_costs
from helpers.runs.planned_runs import counts_of


class Clock:
    """Of a target whose call takes 8 ms and 1 ms a token of every row, of a draft that takes half of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, tuple[int, ...], int]] = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def watch(self, backbone: Backbone, name: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
        def forward(tokens: torch.Tensor, lengths: torch.Tensor, *_: Any) -> None:
            self.now += factor * 0.001 * (8 + tokens.numel())
            self.calls.append((name, tuple(tokens.shape), int(lengths[0])))

        monkeypatch.setattr(backbone, "forward", forward)


@pytest.mark.parametrize("rows", [1, 3])
def test_calls_of_every_size_have_the_batch(rows: int, target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    draft = make_drafter(target).backbone
    clock.watch(target, "target", 1.0, monkeypatch)
    clock.watch(draft, "draft", 0.5, monkeypatch)
    costs = measure_costs(target, draft, [1, 4], context=7, rounds=2, rows=rows, text=[5, 6, 7])
    one = 8 + rows
    assert costs.target_call_seconds == pytest.approx(0.001 * one)
    assert costs.c == pytest.approx(0.5)
    assert costs.c_v == {1: pytest.approx((8 + 2 * rows) / one), 4: pytest.approx((8 + 5 * rows) / one)}
    assert set(clock.calls) == {
        ("target", (rows, 1), 7),
        ("draft", (rows, 1), 7),
        ("target", (rows, 2), 7),
        ("target", (rows, 5), 7),
    }


def test_a_verify_call_lies_on_a_line_between_those_that_were_timed() -> None:
    costs = Costs(0.01, 0.25, {2: 1.2, 5: 1.8})
    assert [costs.verify(n) for n in (1, 2, 3, 4.5, 6, 9)] == pytest.approx([1.0, 1.1, 1.2, 1.5, 1.8, 1.8])
    assert costs.predicted_speedup(2.4, 2) == pytest.approx(2.4 / (1.2 + 2 * 0.25))
    assert costs.predicted_speedup(2.4, 5, draft_steps=1) == pytest.approx(2.4 / (1.8 + 0.25))
    assert Costs(0.01, None, {2: 1.2}).predicted_speedup(2.4, 2) == pytest.approx(2.0)


def test_calls_on_a_gpu_are_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tell milliseconds, and are waited for in front of the first call and behind the last."""
    happened: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.at = 0.0

        def record(self) -> None:
            happened.append("event")
            self.at = 4.0 * happened.count("call")

        def synchronize(self) -> None:
            happened.append("wait")

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: happened.append("ready"))
    seconds = timing.turns({"a": lambda: happened.append("call")}, 2, device=torch.device("cuda"), repeats=3)
    assert seconds == {"a": [pytest.approx(0.004)] * 2}
    assert happened == ["ready", "event", "call", "call", "call", "event", "wait"] * 3


def test_neighbours_are_compared_round_by_round() -> None:
    assert timing.times_as_long([2.0, 6.0, 9.0], [1.0, 2.0, 3.0]) == 3.0
    with pytest.raises(ValueError, match="argument"):
        timing.times_as_long([1.0], [1.0, 2.0])


def generation(tokens: list[int], seconds: float, calls: int, **more: Any) -> Generation:
    """Rows of so many tokens behind the prefill's."""
    rows = [[7] * (each + 1) for each in tokens]
    return Generation(
        rows, [[]] * len(rows), StepLog(len(rows), 1, 9), decode_seconds=seconds, target_calls=calls, **more
    )


def test_a_run_adds_up_what_both_took_and_wrote() -> None:
    """Two batches of two rows of unlike length, the first one decoded twice."""
    run = AllRounds()
    own = {"propose_seconds": 0.3, "nodes": 12, "prefill_seconds": 0.5}
    run.add(generation([6, 2], 3.0, 6), generation([6, 2], 1.5, 3, **own), first=True)
    run.add(generation([6, 2], 5.0, 6), generation([6, 2], 2.5, 3, **own), first=False)
    run.add(generation([4, 4], 2.0, 4), generation([4, 3], 1.0, 2, **own), first=True)
    assert (run.seconds_G, run.baseline_seconds_G) == ([4.0, 1.0], [8.0, 2.0])
    assert (run.tokens_G, run.baseline_tokens_G) == ([16, 7], [16, 8])
    assert (run.target_calls, run.baseline_calls, run.nodes) == (8, 16, 36)
    assert run.mean_nodes == 4.5
    assert run.step_costs == [1.5 / 3 / 0.5, 2.5 / 3 / (5 / 6), 1.0 / 2 / 0.5], "of every turn, the repeats too"
    assert run.prefill_seconds == 1.0, "of the first round alone"
    assert run.differing == 1
    assert run.proposing_cost == pytest.approx(0.9 / 8 / (10 / 16))
    fields = speed_fields(run, 0)
    assert fields["tokens_per_second"] == pytest.approx(23 / 5)
    assert fields["baseline_tokens_per_second"] == pytest.approx(24 / 10)
    assert fields["speedup"][0] == pytest.approx((8.0 + 2.0 * 7 / 8) / 5)
    assert fields["prefill_seconds"] == 1.0
    assert AllRounds().proposing_cost == 0.0
    assert AllRounds().mean_nodes == 0.0
    nothing = AllRounds()
    nothing.add(generation([0], 0.0, 0), generation([0], 0.0, 0), first=True)
    assert speed_fields(nothing, 0)["tokens_per_second"] is None
    both = AllRounds()
    both.extend(run)
    both.extend(run)
    assert (both.target_calls, both.seconds_G, both.proposing_cost) == (16, [4.0, 1.0] * 2, run.proposing_cost)


REQUESTS = [
    Request(Prompt(str(n), "even" if n % 2 else "odd", (), chat=False), [n + 1] * length, n)
    for n, length in enumerate([2, 12, 4])
]


class Measured:
    """`evaluate` over a run made by hand, and what it asked to be timed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: AllRounds) -> None:
        self.asked: list[dict[str, Any]] = []
        monkeypatch.setattr(evaluating, "decode", lambda _target, arms, *_: [run for _ in arms])
        monkeypatch.setattr(evaluating, "measure_costs", self.costs)
        monkeypatch.setattr(evaluating, "environment", dict)
        monkeypatch.setattr(evaluating, "_sample", lambda *_: [])

    def costs(self, target: Any, draft: Any, sizes: list[int], **how: Any) -> Costs:
        self.asked.append({"draft": draft, "sizes": sizes, **how})
        return Costs(0.020, 0.25, {each: 1 + 0.1 * each for each in sizes})


def by_hand() -> AllRounds:
    """Three requests whose steps verified 3.5 nodes on average, in two batches."""
    return AllRounds(
        counts=[counts_of(4, [3, 2]), counts_of(2, [1, 0]), counts_of(3, [3, 3])],
        seconds_G=[2.0, 1.0],
        baseline_seconds_G=[4.0, 3.0],
        tokens_G=[16.0, 9.0],
        baseline_tokens_G=[16.0, 9.0],
        propose_seconds=0.6,
        target_calls=10,
        baseline_calls=14,
        nodes=35,
        differing=1,
        baseline_texts=[[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 1, 2, 1, 2]],
    )


def test_a_row_of_results_by_hand(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Measured(monkeypatch, by_hand())
    drafter = make_drafter(target, draft_length=4)
    config = EvalConfig(
        max_new_tokens=20, batch=2, sweep=[1, 3], draft_length=4, temperatures=[0.0, 0.5], prompts="some"
    )
    arm = Arm("d", drafter, "lossless")
    results = evaluating.evaluate(target, [arm], REQUESTS, config, left_out=5)
    (asked,) = seen.asked
    assert asked["draft"] is drafter.backbone
    assert asked["rows"] == 2, "verify calls of the batch that is decoded"
    assert asked["context"] == 4 + 10, "the median prompt, and half an answer"
    assert asked["text"] == [1] * 2 + [2] * 12 + [3] * 4
    assert {1, 2, 3, 4} <= set(asked["sizes"]), "the sweep's, and of trees up to the widest"
    assert max(asked["sizes"]) == 4
    row, warm = results["rows"]
    assert row["tau"][0] == pytest.approx(1 + 12 / 9)
    assert row["mean_nodes"] == 3.5
    assert row["draft_steps"] == 2.5, "no more than were drafted"
    assert row["c_v"] == pytest.approx(1.25)
    assert row["c"] == 0.25
    assert row["predicted_speedup"] == pytest.approx(row["tau"][0] / (1.25 + 2.5 * 0.25))
    share = bytes_of(drafter.module) / bytes_of(target.model)
    assert row["mbsu"] == pytest.approx(row["tau"][0] / (1 + 2.5 * share))
    assert (row["differing_rows"], warm["differing_rows"]) == (1, None)
    assert row["tokens_per_second"] == pytest.approx(25 / 3)
    assert row["distinct_2"] == pytest.approx((3 + 3 + 2) / 11)
    assert row["loop_share"] == pytest.approx(6 / 14)
    even, odd = row["categories"]
    assert (even["category"], even["requests"], even["tau"][0]) == ("even", 1, pytest.approx(3 / 2))
    assert (odd["category"], odd["requests"], odd["tau"][0]) == ("odd", 2, pytest.approx(18 / 7))
    assert results["costs"] == {
        "target_call_ms": pytest.approx(20.0),
        "c": 0.25,
        "c_v": {str(n): 1 + 0.1 * n for n in asked["sizes"]},
        "context": 14,
    }
    assert results["left_out"] == 5
    assert results["draft"]["bytes"] == bytes_of(drafter.module)
    one, three = results["sweep"]
    assert (one["draft_length"], three["draft_length"]) == (1, 3)
    assert (one["c_v"], three["c_v"]) == (1.1, pytest.approx(1.3))
    assert one["predicted_speedup"] == pytest.approx(row["tau"][0] / (1.1 + 0.25))
    assert three["predicted_speedup"] == pytest.approx(row["tau"][0] / (1.3 + 3 * 0.25))
    assert drafter.draft_length == 4, "put back"


def test_where_a_step_is_no_call_proposing_is_shared_out(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.06 s a proposal, where a step of plain decoding takes half a second."""
    seen = Measured(monkeypatch, by_hand())
    config = EvalConfig(max_new_tokens=20, temperatures=[0.0])
    (row,) = evaluating.evaluate(target, [Arm("l", PromptLookup(draft_length=4))], REQUESTS, config)["rows"]
    assert seen.asked[0]["draft"] is None
    assert row["draft_steps"] == 1.0
    assert row["c"] == pytest.approx(0.06 / 0.5)
    assert row["predicted_speedup"] == pytest.approx(row["tau"][0] / (1.25 + 0.12))
    assert row["mbsu"] == pytest.approx(row["tau"][0]), "nothing is read for a draft"


def test_text_is_measured_over_tokens_of_all_texts() -> None:
    made = degeneracy([[1, 2, 1, 2, 1, 2], [3, 4, 5, 6]])
    assert made.distinct_2 == pytest.approx(5 / 8)
    assert made.loop_share == pytest.approx(0.6)
    assert made.flagged
    assert not degeneracy([[1, 2, 1, 2, 1, 2], [3, 4, 5, 6, 7, 8]]).flagged, "half of it is not more than half"
    rare = degeneracy([[1, 1, 2, 1, 1, 2, 2, 1, 1, 2, 2, 2, 1, 2, 1, 1, 2, 1]])
    assert rare.distinct_2 < 0.25
    assert rare.flagged
    assert (degeneracy([[]]).distinct_2, degeneracy([[]]).loop_share) == (1.0, 0.0)


def test_tau_of_several_logs_is_of_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "counts_of", list)
    logs: Any = [[counts_of(4, [3, 2])], [counts_of(1, [0, 0]), counts_of(0, [0, 0])]]
    assert metrics.tau(logs) == pytest.approx(10 / 5)
    assert np.isnan(metrics.tau([]))


def test_bytes_of_a_model_are_those_of_its_products(target: Backbone) -> None:
    """The embedding is the projection here, and is read once."""
    weights = {p.data_ptr(): p for p in target.model.parameters()}
    assert bytes_of(target.model) == sum(4 * each.numel() for each in weights.values())
    loose = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 3, bias=False).half())
    assert bytes_of(loose) == 3 * 8 * 2
    assert speed.bytes_of(loose[1]) == 48


def test_what_is_timed_and_read_is_of_the_largest_method(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two methods the second drafts more nodes, and is the one that has weights of its own."""
    seen = Measured(monkeypatch, by_hand())
    drafter = make_drafter(target, draft_length=6)
    arms = [Arm("copies", PromptLookup(draft_length=2)), Arm("drafts", drafter)]
    config = EvalConfig(max_new_tokens=20, temperatures=[0.0], draft_length=6)
    results = evaluating.evaluate(target, arms, REQUESTS, config)
    assert seen.asked[0]["sizes"] == [1, 2, 4, 6], "those below its 7 nodes, and these"
    assert results["draft"]["bytes"] == bytes_of(drafter.module) > 0


def test_a_sample_shows_what_stands_in_front_of_the_answer() -> None:
    """The last 400 characters of the prompt, of the first three requests."""

    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "".join(chr(each) for each in ids)

    target: Any = SimpleNamespace(tokenizer=Tokenizer())
    requests = [Request(Prompt(str(n), "all", (), chat=False), [97] * 10 + [98] * 400, n) for n in range(4)]
    written = SimpleNamespace(tokens=[[120, 121]] * 4, origin=[["prefill", "draft"]] * 4)
    run: Any = SimpleNamespace(generations=[written])
    shown = evaluating._sample(target, requests, run)
    assert [each["id"] for each in shown] == ["0", "1", "2"]
    assert shown[0]["prompt"] == "b" * 400
    assert shown[0]["tokens"] == [["x", "prefill"], ["y", "draft"]]
