"""Steps whose outcome the device alone knows: the loop reads nothing between reports, and what is left out is left out.

A CPU stands in for the device: its fused AdamW takes the same flag.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.decoding.on_host import on_host
from draftsmith.errors import TrainingFailed
from draftsmith.trainers.loop import optimizer, step
from draftsmith.trainers.loop.optimizer import LeftOut, MuonByFlag, Unread, leaves_out_by_itself
from draftsmith.trainers.loop.state import Average
from draftsmith.trainers.method_config import RolloutsConfig
from draftsmith.trainers.packed import passes
from draftsmith.trainers.student import compared
from faults import poison, toy
from helpers.models.method_cases import CASES
from helpers.models.method_objectives import OBJECTIVES
from helpers.pretended_device import Place, watched
from safetensors.torch import load_file


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose reading is not free."""
    monkeypatch.setattr(step, "leaves_out_by_itself", lambda *_: True)
    build = optimizer.build
    monkeypatch.setattr(optimizer, "build", lambda module, config, **_: build(module, config, fused=True))


def reported(out: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


def test_a_run_is_that_of_a_loop_that_reads_each_step(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    toy.run(toy.loop_in(tmp_path / "read", log_every=4))
    request.getfixturevalue("device")
    toy.run(toy.loop_in(tmp_path / "unread", log_every=4))
    mine, theirs = reported(tmp_path / "unread"), reported(tmp_path / "read")
    assert [line["step"] for line in mine] == [line["step"] for line in theirs] == [4, 8, 12]
    for one, other in zip(mine, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.parametrize(("method", "chosen"), [("medusa", "adamw"), ("eagle", "muon")])
@pytest.mark.usefixtures("device")
def test_steps_that_are_not_finite_leave_no_trace(
    method: str, chosen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No weight moves in them, and every weight in the others; the average stays as well, and moments are finite."""
    loop = toy.loop_in(tmp_path, method, log_every=6, ema=0.9, optimizer=chosen)
    assert loop.average is not None
    assert len(loop.optimizers) == (2 if chosen == "muon" else 1)
    averages: list[dict[str, torch.Tensor]] = []
    take = loop.train_step

    def train_step(number: int, *rest: Any) -> None:
        take(number, *rest)
        averages.append({name: each.clone() for name, each in loop.average.tensors.items()})

    loop.train_step = train_step  # type: ignore[method-assign]
    bad = {3: "loss", 4: "gradient", 8: "feature"}
    planted = poison.Poison(loop, bad.get, bad.__contains__)
    with caplog.at_level(logging.WARNING):
        toy.run(loop)
    assert planted.moved == []
    assert loop.steps.skipped == 3
    for number, (before, after) in enumerate(zip(averages, averages[1:], strict=False), start=1):
        assert all(torch.equal(before[name], after[name]) for name in before) == (number in bad)
    said = [each.getMessage() for each in caplog.records if "skipped" in each.getMessage()]
    assert [line.split(":")[0] for line in said] == ["2 steps up to step 5 skipped", "1 steps up to step 10 skipped"]
    saved = load_file(tmp_path / "checkpoints" / "step-00000012" / "optimizer-0.safetensors")
    assert all(torch.isfinite(each).all() for each in saved.values())
    assert {float(each) for name, each in saved.items() if name.endswith("step")} == {9.0}


@pytest.mark.usefixtures("device")
def test_too_many_in_a_row_end_the_run_at_the_next_report(tmp_path: Path) -> None:
    loop = toy.loop_in(tmp_path, "medusa", log_every=4, max_bad_steps=2)
    start = poison.weights(loop)
    poison.Poison(loop, lambda number: "loss", lambda _: True)
    with pytest.raises(TrainingFailed, match="up to step 4: 4 non-finite steps in a row"):
        toy.run(loop)
    assert all(torch.equal(start[name], each) for name, each in poison.weights(loop).items())


def read_in(loop: Any, monkeypatch: pytest.MonkeyPatch) -> dict[Place, set[str]]:
    """What a step in the middle of a short run reads of the device: by which function, and by what."""
    with watched(loop, range(1, 2), monkeypatch) as watch:
        toy.run(loop)
    return watch.read


def loop_of(case: str, out: Path, *, given: dict[str, Any] | None = None, **values: Any) -> Any:
    method, sections = CASES[case]
    given = sections | (given or {})
    small = {"steps": 3, "log_every": 3, "validate_every": 3, "validate_rows": 1, "batch_rows": 4, "micro_rows": 2}
    return toy.loop_in(out, method, given=given, **(small | values))


def test_every_method_is_watched() -> None:
    assert {method for method, _ in CASES.values()} == {"target", *OBJECTIVES}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("device")
def test_nothing_is_read_between_reports(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_in(loop_of(case, tmp_path), monkeypatch) == {}


@pytest.mark.parametrize("case", ["distill", "peagle", "pard"])
@pytest.mark.usefixtures("device")
def test_nor_of_rows_without_a_mask(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MASKED", 8)
    assert read_in(loop_of(case, tmp_path), monkeypatch) == {}


@pytest.mark.usefixtures("device")
def test_nor_with_muon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of("eagle", tmp_path, optimizer="muon")
    assert len(loop.optimizers) == 2
    assert read_in(loop, monkeypatch) == {}


@pytest.mark.usefixtures("device")
def test_nor_of_rows_that_models_wrote_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written in the first step, and trained on in the second."""
    given = RolloutsConfig(share=0.5, every_steps=3, prompt_tokens=4, new_tokens=4)
    loop = loop_of("distill", tmp_path, given={"rollouts": given})
    assert read_in(loop, monkeypatch) == {}
    assert bool(loop.rollouts.kept["replaced"].any())


def test_what_reads_each_step_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fixture the loop does, and nothing else."""
    found = read_in(loop_of("eagle", tmp_path), monkeypatch)
    assert found == {Place("trainers/loop/step.py", "Steps.update_at_once"): {"_local_scalar_dense"}}


@pytest.mark.usefixtures("device")
def test_every_kind_of_read_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted into what is made of the rows on the device; the host's own numbers may be read."""
    real = compared.report_weights

    def report_weights(at_P: torch.Tensor, *rest: Any) -> torch.Tensor:
        weight_P = real(at_P, *rest)
        float(weight_P.sum())
        weight_P.nonzero()
        weight_P[weight_P > 0]
        weight_P.detach().cpu()
        weight_P.tolist()
        on_host(at_P).tolist()
        on_host(at_P).nonzero()
        return weight_P

    monkeypatch.setattr(compared, "report_weights", report_weights)
    reads = {"_local_scalar_dense", "nonzero", "index", "cpu", "tolist"}
    assert read_in(loop_of("eagle", tmp_path), monkeypatch) == {
        Place("trainers/student/compared.py", "Student.compare"): reads
    }


def test_flags_are_counted_across_readings() -> None:
    unread = Unread()
    assert unread.read(0) is None
    for flags, row, found in (
        ([True, False, False], 0, LeftOut(2, 2, 2)),
        ([False, True, False], 2, LeftOut(2, 1, 3)),
        ([True], 1, LeftOut(0, 0, 0)),
    ):
        for flag in flags:
            unread.note(torch.tensor(flag))
        assert unread.read(row) == found


def test_what_takes_no_flag_and_a_cpu_are_read_at_once() -> None:
    class Wrapped:
        def __init__(self, **words: Any) -> None:
            self.optimizer = torch.optim.AdamW([torch.zeros(1)], **words)

    plain, fused, muon, torchs = Wrapped(), Wrapped(fused=True), Wrapped(), Wrapped()
    muon.optimizer = MuonByFlag([torch.zeros(2, 2)])  # type: ignore[assignment]
    torchs.optimizer = torch.optim.Muon([torch.zeros(2, 2)])  # type: ignore[assignment]
    cuda = torch.device("cuda")
    assert leaves_out_by_itself([fused], cuda)
    assert not leaves_out_by_itself([fused], torch.device("cpu"))
    assert not leaves_out_by_itself([plain], cuda)
    assert leaves_out_by_itself([fused, muon], cuda)
    assert not leaves_out_by_itself([fused, torchs], cuda)


@pytest.mark.parametrize(("taken", "weight"), [(None, 5.0), (True, 5.0), (False, 4.0)])
def test_an_average_moves_by_a_quarter_where_the_step_was_taken(taken: bool | None, weight: float) -> None:
    module = torch.nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(4.0)
    average = Average(module, 0.75)
    module.weight.data.fill_(8.0)
    average.update(module, None if taken is None else torch.tensor(taken))
    assert average.tensors["weight"].item() == weight


def steps_of(max_bad_steps: int) -> step.Steps:
    made = object.__new__(step.Steps)
    loop: Any = SimpleNamespace(max_bad_steps=max_bad_steps)
    made.loop, made.skipped, made.bad_steps, made.unread = loop, 0, 0, Unread()
    return made


def test_as_many_bad_steps_in_a_row_as_are_allowed_end_nothing() -> None:
    """Two: read at once, and by the flags of a report, where a row goes on over it."""
    read, unread = steps_of(2), steps_of(2)
    for number, finite in enumerate((False, False, True, False, False)):
        read.count(number, finite=finite)
        assert unread.unread is not None
        unread.unread.note(torch.tensor(finite))
        if number in (0, 3):
            unread.settle(number)
    unread.settle(4)
    assert (read.skipped, read.bad_steps) == (unread.skipped, unread.bad_steps) == (4, 2)
    with pytest.raises(TrainingFailed, match=r"step 5: 3 non-finite steps in a row \(limit .* = 2\)"):
        read.count(5, finite=False)
    unread.unread.note(torch.tensor(False))
    with pytest.raises(TrainingFailed, match=r"up to step 5: 3 non-finite steps in a row \(limit .* = 2\)"):
        unread.settle(5)
