"""Memory that runs out: the same batch in smaller parts, or one message and whole checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.data.features.store import FeatureStore
from draftsmith.errors import EnvironmentFailure
from draftsmith.trainers.loop import state
from draftsmith.trainers.loop import step as stepping
from draftsmith.trainers.loop.loop import Loop
from draftsmith.trainers.loop.step import cut
from draftsmith.trainers.teacher.features import CachedFeatures
from faults import toy
from helpers.reliability_tally import tally

AT = 5  # the step in which memory runs out, counted from 0
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("control")
    toy.run(toy.loop_in(out))
    return out


def full(*_: Any) -> Any:
    raise torch.OutOfMemoryError(TEXT)


def too_many_rows(loop: Loop, most: int, where: str) -> None:
    """From step `AT` on a forward pass of more than `most` rows finds no memory, or its backward pass does."""
    steps = {"now": -1}
    take = loop.train_step

    def train_step(step: int, *rest: Any) -> None:
        steps["now"] = step
        take(step, *rest)

    def behind_forward(_module: Any, given: Any, made: Any) -> None:
        if steps["now"] < AT or len(given[0]["input_ids"]) <= most or not made[0].requires_grad:
            return
        if where == "forward":
            full()
        made[0].register_hook(full)

    loop.train_step = train_step  # type: ignore[method-assign]
    loop.objective.module.register_forward_hook(behind_forward)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("most", "lines"), [(2, 1), (1, 2)])
def test_the_same_batch_in_smaller_parts(
    where: str, most: int, lines: int, control: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = toy.loop_in(tmp_path)
    too_many_rows(loop, most, where)
    with caplog.at_level(logging.WARNING):
        toy.run(loop)
    said = [each.getMessage() for each in caplog.records if "ran out of memory" in each.getMessage()]
    assert len(said) == lines, "once for each halving, and never again"
    assert f"step {AT} " in said[0]
    assert f"--loop.micro_rows {most}" in said[-1]
    assert loop.steps.skipped == 0
    mine, theirs = toy.losses(tmp_path), toy.losses(control)
    assert {step: mine[step] for step in range(1, AT + 1)} == {step: theirs[step] for step in range(1, AT + 1)}
    assert mine == pytest.approx(theirs, rel=1e-6)
    tally("out of memory", tried=1)


def test_what_is_read_ahead_has_the_new_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the target's states none but those of the step that is taken again are waited for."""
    online = toy.objective_of("medusa")
    store = FeatureStore(tmp_path / "features", {}, max_bytes=10**7, row_bytes=24 * 32 * 4)
    online.features = CachedFeatures(online.features, store, "fp32")
    monkeypatch.setattr(toy, "objective_of", lambda _method, _device: online)
    loop = toy.loop_in(tmp_path, "medusa")
    too_many_rows(loop, 2, "forward")
    now, fetched = [-1], []
    take, fetch = loop.train_step, online.features.fetch

    def train_step(step: int, *rest: Any) -> None:
        now[0] = step
        take(step, *rest)
        now[0] = -1

    def fetch_now(batch: Any) -> Any:
        fetched.append((now[0], len(batch["input_ids"])))
        return fetch(batch)

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(online.features, "fetch", fetch_now)
    toy.run(loop)
    assert loop.steps.micro_rows == 2
    assert [(step, rows) for step, rows in fetched if step >= 0] == [(0, 4), (AT, 2)]
    store.close()


def test_parts_keep_every_row_and_small_batches_stay_as_they_are() -> None:
    batch = {"input_ids": torch.arange(10).view(5, 2), "loss_mask": torch.ones(5, 2)}
    assert next(cut(batch, 5)) is batch
    parts = [*cut(batch, 2)]
    assert [len(part["loss_mask"]) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), batch["input_ids"])


def test_one_row_that_is_too_much(tmp_path: Path) -> None:
    loop = toy.loop_in(tmp_path, micro_rows=1)
    too_many_rows(loop, 0, "forward")
    with pytest.raises(EnvironmentFailure, match=r"in step 5 with 1 row of a forward pass .CUDA out of memory"):
        toy.run(loop)
    tally("out of memory", tried=1)


def check_goes_on(out: Path, control: Path, stopped: Callable[[], None], micro_rows: int = 4) -> None:
    """What ended with a message is continued by the same command to the same bits."""
    with pytest.raises(EnvironmentFailure, match="memory ran out .*--loop.micro_rows"):
        stopped()
    toy.run(toy.loop_in(out, micro_rows=micro_rows))
    if micro_rows == 4:
        assert toy.state_files(out) == toy.state_files(control)
    assert toy.losses(out) == pytest.approx(toy.losses(control), rel=1e-6)
    tally("out of memory", tried=1)


@pytest.mark.parametrize("micro_rows", [4, 2])
def test_an_update_that_ran_out_of_memory_is_not_trusted(micro_rows: int, control: Path, tmp_path: Path) -> None:
    """Some of the weights may have moved: the run goes on from the checkpoint, with fewer rows too."""
    loop = toy.loop_in(tmp_path)
    (own,) = loop.optimizers
    real = own.step

    def step(*given: Any) -> None:
        real(*given)
        if len(toy.losses(tmp_path)) == 7:
            full()

    own.step = step  # type: ignore[method-assign]
    check_goes_on(tmp_path, control, lambda: toy.run(loop), micro_rows)


@pytest.mark.parametrize("times", [1, 2])
def test_a_save_is_tried_once_more(times: int, control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = toy.loop_in(tmp_path)
    left = [times]

    def save(folder: Path, optimizers: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory")
        state_save(folder, optimizers)

    state_save = state.save_optimizers
    monkeypatch.setattr(state, "save_optimizers", save)
    if times == 2:
        check_goes_on(tmp_path, control, lambda: toy.run(loop))
        return
    toy.run(loop)
    assert toy.state_files(tmp_path) == toy.state_files(control)
    assert not [*(tmp_path / "checkpoints").glob(".staging*")]
    tally("out of memory", tried=1)


def test_micro_batches_are_halved_to_the_larger_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven rows four are tried, then two, then one; behind one there is nothing."""
    monkeypatch.setattr(stepping, "free_memory", lambda: None)
    made: Any = object.__new__(stepping.Steps)
    made.optimizers, made.feed, made.micro_rows = [], SimpleNamespace(forget=lambda: None), 7
    made.seed = lambda _step: None
    seen = []
    for _ in range(3):
        made.start_again(3)
        seen.append(made.micro_rows)
    assert seen == [4, 2, 1]
