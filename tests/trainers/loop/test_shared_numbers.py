"""Numbers that several processes make together, or that a report gives: worked out by hand, on the test's own clock."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.trainers.loop import loop as looping
from draftsmith.trainers.loop import progress
from draftsmith.trainers.loop.feed import Feed
from draftsmith.trainers.loop.order import RowGroup, RowOrder, seed_of
from draftsmith.trainers.loop.progress import Meter, Record, Screen, records
from draftsmith.trainers.loop.sums import COMPARED, COUNT, add_terms, means
from draftsmith.trainers.teacher.rollouts import REPLACED, Rollouts
from faults import toy


class Collected:
    """Validation of one process of several: its sums and labels, which the others' are added to."""

    def __init__(self, loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = loop
        self.sums: dict[str, float] = {}
        self.labels = 0.0
        monkeypatch.setattr(looping, "totals", self.totals)
        monkeypatch.setattr(loop, "in_all", self.in_all)

    def totals(self, _accelerator: Any, sums: dict[str, torch.Tensor]) -> dict[str, float]:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        return dict(self.sums)

    def in_all(self, labels: float) -> float:
        self.labels += labels
        return self.labels

    def validated(self, groups: int, size: int = 1) -> tuple[float, list[int]]:
        """The mean of `groups` processes, and the rows that were asked for."""
        self.sums, self.labels = {}, 0.0
        asked: list[int] = []
        rows, batch = self.loop.validation_rows, self.loop.validation_rows.batch
        rows.batch = lambda some: (asked.extend(some), batch(some))[1]
        silent: Any = SimpleNamespace(write=lambda *_: None, report=lambda *_: None, warn_of_no_loss=lambda *_: None)
        value = float("nan")
        for number in range(groups):
            self.loop.group = RowGroup(number, groups, size)
            value = self.loop.validate(1, silent, silent)
        rows.batch = batch
        return value, asked


@pytest.mark.parametrize("count", [3, 5, 8])
def test_held_out_rows_that_do_not_divide_count_once(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two processes and on three as on one; rows that fill up make passes, and no loss."""
    loop = toy.loop_in(tmp_path, "target", validate_rows=count)
    loop.validation_rows.uneven = True
    seen = Collected(loop, monkeypatch)
    alone, rows = seen.validated(1)
    assert len(set(rows)) == len(rows) == count
    labels = seen.labels
    for groups in (2, 3):
        together, asked = seen.validated(groups)
        assert together == pytest.approx(alone, rel=1e-6)
        assert seen.labels == labels
        assert set(asked) == set(rows)
        assert len(asked) == groups * -(-count // groups), "each makes as many passes as any"


def test_labels_of_processes_that_share_rows_count_once(tmp_path: Path) -> None:
    loop = toy.loop_in(tmp_path, "target")
    loop.group = RowGroup(0, 1, 4)
    assert loop.in_all(12) == 3


def test_rows_of_a_step_are_shared_out_and_drawn_for_by_their_place(tmp_path: Path) -> None:
    """Of two processes: each of its own rows, with one seed for both, another one in every step."""
    loop = toy.loop_in(tmp_path, "target")
    asked: list[tuple[list[int], int, int]] = []
    loop.rollouts = SimpleNamespace(
        rewrite=lambda batches, places, step, seed: (asked.append((list(places), step, seed)), batches)[1]
    )
    for rank in range(2):
        loop.accelerator = SimpleNamespace(process_index=rank, num_processes=2, device=torch.device("cpu"))
        for step in (3, 4):
            loop.rewritten(step, [], Meter())
    places = [each for each, _, _ in asked]
    assert places == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2
    seeds = [seed for _, _, seed in asked]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


def test_what_processes_draw_in_a_step_is_their_own_and_what_they_share_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, processes and seeds: no two of them seed torch alike; masks and anchors have one seed for all processes."""
    loop = toy.loop_in(tmp_path, "target")
    own: list[int] = []
    shared: list[tuple[int, int]] = []
    monkeypatch.setattr(torch, "manual_seed", own.append)
    monkeypatch.setattr(loop.objective, "begin_step", lambda step, seed: shared.append((step, seed)), raising=False)
    for seed in (0, 1):
        for rank in range(3):
            loop.steps.accelerator = SimpleNamespace(process_index=rank)
            loop.steps.loop = loop.plan.loop.model_copy(update={"seed": seed})
            for step in range(4):
                loop.steps.seed(step)
    assert len(set(own)) == len(own) == 24
    assert len(shared) == 24
    assert len({seed for _, seed in shared}) == 8, "of two seeds and four steps"
    assert all(shared[at][1] == shared[at + 4][1] == shared[at + 8][1] for at in range(4))
    assert not {seed for _, seed in shared} & set(own)
    assert seed_of("1/2") == seed_of("1/2") != seed_of("12")


def test_every_epoch_and_seed_has_an_order_of_its_own() -> None:
    orders = [tuple(RowOrder(17, 17, seed).step(epoch)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    assert all(sorted(each) == list(range(17)) for each in orders)
    assert RowOrder(10, 4, 0).epoch(5) == 2.0
    assert RowOrder(10, 4, 0).epoch(1) == 0.4


def test_rows_that_were_written_come_back_to_their_process() -> None:
    """Of 6 rows on two processes, and on one that goes on with them, or on three."""
    kept = {
        name: torch.arange(6).reshape(6, 1).expand(6, 2).clone() + offset
        for offset, name in enumerate(("input_ids", "loss_mask", "positions", "documents"))
    } | {REPLACED: torch.tensor([True, False, False, True, True, False])}
    own = Rollouts.__new__(Rollouts)
    parts = []
    for rank in range(2):
        own.recall(kept, rank, 2)
        assert own.kept is not None
        assert own.kept["input_ids"][:, 0].tolist() == [rank, rank + 2, rank + 4]
        parts.append(own.kept)
    whole = own.of_all(parts)
    assert all(torch.equal(whole[name], kept[name]) for name in kept)
    own.recall(whole, 2, 3)
    assert own.kept["input_ids"][:, 0].tolist() == [2, 5]
    assert own.kept[REPLACED].tolist() == [False, False]


def test_a_probe_decodes_with_the_average_that_is_exported(tmp_path: Path) -> None:
    """The tau that chooses a step is of the weights that it exports."""
    loop = toy.loop_in(tmp_path, "target", ema=0.9)
    draft = loop.objective.draft() or loop.objective.module
    loop.objective.draft = lambda: draft
    name, weight = next(iter(draft.named_parameters()))
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
    trained = weight.detach().clone()
    seen: dict[str, torch.Tensor] = {}

    def probe(module: Any) -> dict[str, float]:
        seen["probe"] = dict(module.named_parameters())[name].detach().clone()
        assert not module.training
        return {"tau": 1.5}

    loop.probe = probe
    loop.objective.export = lambda _folder: seen.__setitem__("export", weight.detach().clone())
    silent: Any = SimpleNamespace(write=lambda *_: None, report=lambda *_: None)
    loop.probe_and_export(1, silent, silent)
    assert torch.equal(weight, trained), "put back"
    assert torch.equal(seen["probe"], before), "no step has been averaged yet"
    assert torch.equal(seen["export"], seen["probe"])
    assert loop.best == {"tau": 1.5, "step": 1.0}


@pytest.mark.parametrize(("tau", "best"), [(1.4, 1), (1.5, 2), (1.6, 2)])
def test_the_later_of_equal_probes_is_the_best(tau: float, best: int, tmp_path: Path) -> None:
    loop = toy.loop_in(tmp_path, "target")
    loop.objective.draft = lambda: loop.objective.module
    exported: list[int] = []
    silent: Any = SimpleNamespace(write=lambda *_: None, report=lambda *_: None)
    for step, value in ((1, 1.5), (2, tau)):
        loop.probe = lambda _module, value=value: {"tau": value}
        loop.export = lambda step=step: exported.append(step)
        loop.probe_and_export(step, silent, silent)
    assert loop.best["step"] == best
    assert exported == [1, 2][:best]


def test_a_report_is_means_over_labels_and_shares_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of unlike labels in eight seconds, of which one was waited and two were written in."""
    clock = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    meter = Meter()
    meter.add({"loss": torch.tensor(6.0), "alpha": torch.tensor(1.0)}, 2.0, 640, 0.75)
    meter.add({"loss": torch.tensor(3.0)}, 4.0, 640, 0.25)
    meter.add_rollouts(1.5)
    meter.add_rollouts(0.5)
    clock[0] += 8.0
    alone: Any = SimpleNamespace(num_processes=1)
    assert meter.means(alone) == {"loss": 1.5, "alpha": pytest.approx(1 / 6)}
    found = meter.clock()
    assert found["tokens_per_second"] == 160.0
    assert found["data_wait"] == 0.125
    assert found["rollout_share"] == 0.25
    assert 0.01 < found["memory_gb"] < 100
    meter.restart()
    clock[0] += 2.0
    assert meter.means(alone) == {}
    assert "rollout_share" not in meter.clock()
    meter.add({"loss": torch.tensor(8.0)}, 4.0, 100, 0.5)
    assert meter.means(alone) == {"loss": 2.0}
    assert (meter.clock()["tokens_per_second"], meter.clock()["data_wait"]) == (50.0, 0.25)


def test_terms_are_divided_by_what_they_are_summed_over() -> None:
    sums = {"loss": 12.0, "alpha_2": 3.0, COUNT + "alpha_2": 6.0, "kl": 5.0, COMPARED + "kl": 0.0, "tv": 8.0}
    sums |= {COMPARED + "tv": 2.0}
    assert means(sums, 4.0) == {"loss": 3.0, "alpha_2": 0.5, "tv": 2.0}
    assert means({"loss": 12.0}, 0.0) == {}
    assert means({"loss": 0.5, COUNT + "loss": 0.25}, 4.0) == {"loss": 0.5}, "less than one label divides nothing"
    kept: dict[str, torch.Tensor] = {}
    add_terms(kept, {"loss": torch.tensor(1.5)})
    add_terms(kept, {"loss": torch.tensor(2.0), "new": 1.0})
    assert {name: float(value) for name, value in kept.items()} == {"loss": 3.5, "new": 1.0}
    assert kept["loss"].dtype == torch.float64


def test_the_time_left_is_reckoned_from_this_start(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [50.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    screen = Screen(100, first=20, active=True)
    clock[0] += 60.0
    assert screen._eta(40) == "3m00s"
    screen.close()


def test_a_line_has_four_digits_and_whole_numbers_from_a_thousand_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    screen = Screen(100, first=0, active=True)
    screen.report(5, {"loss": 1.23456, "rows": 999.96, "tokens_per_second": 12345.6})
    screen.close()
    assert caplog.messages[0].startswith("step=5/100 loss=1.235 rows=1000 tokens_per_second=12346 eta=")


def test_a_record_goes_on_behind_the_step_that_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Record(path, after=0, active=True)
    for step in range(1, 6):
        first.write("train", step, {"loss": float(step)})
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    again = Record(path, after=3, active=True)
    again.write("train", 4, {"loss": 0.5})
    again.close()
    assert [(each["step"], each["loss"]) for _, each in records(path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 0.5)]
    assert all(json.loads(line) for line in path.read_text().splitlines())
    Record(tmp_path / "other.jsonl", after=0, active=False).write("train", 1, {})
    assert not (tmp_path / "other.jsonl").exists()


def test_what_was_made_ahead_is_forgotten_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the step behind it is made once, when it is asked for."""
    made: list[int] = []
    forgot: list[int] = []
    features = SimpleNamespace(
        looks_ahead=True, expect=lambda _batch: None, forget=lambda: forgot.append(1), take_waited=lambda: 0.5
    )
    feed = Feed(lambda step: (made.append(step), [{"step": step}])[1], SimpleNamespace(features=None), steps=4)  # type: ignore[arg-type]
    feed._features = features  # type: ignore[assignment]
    assert feed.step(0) == [{"step": 0}]
    feed.make_next(0)
    feed.make_next(0)
    assert made == [0, 1]
    feed.forget()
    assert forgot == [1]
    assert feed.step(1) == [{"step": 1}]
    assert made == [0, 1, 1], "made anew, of the new size"
    feed.make_next(1)
    assert feed.step(2) == [{"step": 2}]
    assert made == [0, 1, 1, 2]
    feed.make_next(3)
    assert made == [0, 1, 1, 2], "there is no step behind the last one"
    feed.make_next(0)
    assert feed.step(3) == [{"step": 3}], "not what was made ahead of another step"


def test_waiting_is_of_rows_and_of_features(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.trainers.loop import feed as feeding

    clock = [0.0]
    monkeypatch.setattr(feeding.time, "perf_counter", lambda: clock[0])

    def batches(_step: int) -> list[dict[str, Any]]:
        clock[0] += 2.0
        return []

    feed = Feed(batches, SimpleNamespace(features=None), steps=4)  # type: ignore[arg-type]
    feed.step(0)
    feed.make_next(0)
    assert feed.take_waited() == 4.0
    assert feed.take_waited() == 0.0
    feed._features = SimpleNamespace(take_waited=lambda: 0.5)  # type: ignore[assignment]
    feed.step(1)
    assert feed.take_waited() == 0.5, "it was there"
