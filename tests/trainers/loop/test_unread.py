"""Steps whose outcome the device alone knows: the loop reads nothing between reports, and what is left out is left out.

A CPU stands in for the device: its fused AdamW takes the same flag.
"""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.benchmarks.common.waits import Watch, WatchCopies
from draftsmith.errors import TrainingFailed
from draftsmith.trainers.loop import optimizer, step
from draftsmith.trainers.loop.feed import labels_in
from draftsmith.trainers.loop.optimizer import LeftOut, Unread, leaves_out_by_itself
from faults import poison, toy
from safetensors.torch import load_file

# the loop, and what picks labels and what is compared: by what the host knows of the rows that it made (`on_host.py`)
PICKS = {"labels.py", "heads.py", "medusa.py", "distillation.py", "eagle_common.py", "eagle3.py", "pace.py"}
FREE = {path.name for path in Path(step.__file__).parent.glob("*.py")} | PICKS
METHODS = ("target", "medusa", "distill", "eagle3")


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


@pytest.mark.usefixtures("device")
def test_steps_that_are_not_finite_leave_no_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No weight moves in them, and every weight in the others; the average stays as well, and moments are finite."""
    loop = toy.loop_in(tmp_path, "medusa", log_every=6, ema=0.9)
    assert loop.average is not None
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


def waits_of(loop: Any) -> set[str]:
    """Lines of the loop, and of what it picks, that make the host wait in a step of the middle."""
    watch, take = Watch(cuda=False), loop.train_step
    code, first = inspect.getsourcelines(labels_in)  # of rows that lie on the host; here nothing tells them apart
    counting = {f"feed.py:{first + line}" for line in range(len(code))}

    def train_step(number: int, *rest: Any) -> None:
        watch.open = 2 < number < 6
        take(number, *rest)
        watch.open = False

    loop.train_step = train_step
    with watch, WatchCopies(watch):
        toy.run(loop)
    places = {place.split(" at ")[1] for place in watch.waits}
    return {place for place in places - counting if place.split(":")[0] in FREE}


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_read_between_reports(method: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Not by the loop itself, nor where labels are picked; what reads each step does, so the watch sees it."""
    if method == "target":
        assert any(place.startswith("step.py") for place in waits_of(toy.loop_in(tmp_path / "read", log_every=12)))
    request.getfixturevalue("device")
    assert waits_of(toy.loop_in(tmp_path / "unread", method, log_every=12)) == set()


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


def test_muon_and_a_cpu_are_read_at_once() -> None:
    class Wrapped:
        def __init__(self, **words: Any) -> None:
            self.optimizer = torch.optim.AdamW([torch.zeros(1)], **words)

    plain, fused, muon = Wrapped(), Wrapped(fused=True), Wrapped()
    muon.optimizer = torch.optim.Muon([torch.zeros(2, 2)])  # type: ignore[assignment]
    cuda = torch.device("cuda")
    assert leaves_out_by_itself([fused], cuda)
    assert not leaves_out_by_itself([fused], torch.device("cpu"))
    assert not leaves_out_by_itself([plain], cuda)
    assert not leaves_out_by_itself([fused, muon], cuda)
