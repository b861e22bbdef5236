"""A run that goes on in more and in fewer processes sees every row once, and keeps to the loss of one process."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from draftsmith.trainers.loop.order import RowOrder
from faults import ranks, spread, toy
from helpers.reliability_tally import tally

Stages = list[tuple[int, int | None]]
"""Processes, and the step behind which they end."""
STAGES: Stages = [(1, 5), (2, 10), (4, 15), (1, None)]
FEWER_AND_MORE: Stages = [(2, 7), (1, 14), (4, None)]


def stages(out: Path, method: str, plan: Stages, first: int = 0) -> None:
    for world, stop_at in plan:
        ranks.run(world, spread.stage, out, first, stop_at, method)
        first = stop_at or spread.STEPS


def rows_of(out: Path, first: int, world: int) -> list[list[int]]:
    """The rows of each step of a stage, over all processes."""
    parts = [json.loads((out / f"rows-{first}-{rank}").read_text()) for rank in range(world)]
    return [sorted(sum(step, [])) for step in zip(*parts, strict=True)]


def check_rows(out: Path, plan: Stages) -> None:
    """Every step has the rows of its place in the order, and an epoch has each row once."""
    order, first = RowOrder(toy.ROWS, toy.BATCH, 0), 0
    seen: Counter[int] = Counter()
    for world, stop_at in plan:
        for step, rows in enumerate(rows_of(out, first, world), start=first):
            assert rows == sorted(order.step(step)), step
            seen.update(rows)
        first = stop_at or spread.STEPS
    epochs = spread.STEPS * toy.BATCH // toy.ROWS
    assert seen == dict.fromkeys(range(toy.ROWS), epochs)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["target", "medusa"])
def test_one_two_four_and_one_process(method: str, tmp_path: Path) -> None:
    far = distances(method, STAGES, tmp_path)
    assert all(far[step] == 0 for step in range(1, 6)), "one process up to there"
    tally("world sizes", tried=len(STAGES))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["target", "medusa"])
def test_two_one_and_four_processes(method: str, tmp_path: Path) -> None:
    distances(method, FEWER_AND_MORE, tmp_path)


def distances(method: str, plan: Stages, folder: Path) -> dict[int, float]:
    """How far each step's loss is from that of one process; rows and every stage's first loss are checked."""
    mine, control = folder / "mine", folder / "control"
    stages(mine, method, plan)
    check_rows(mine, plan)
    stages(control, method, [(1, None)])
    got, expected = toy.losses(mine), toy.losses(control)
    assert got.keys() == expected.keys() == set(range(1, spread.STEPS + 1))
    # three held-out rows, which no number of processes but one divides
    assert toy.validations(mine)[-1] == pytest.approx(toy.validations(control)[-1], rel=1e-2)
    far = {step: abs(got[step] / expected[step] - 1) for step in got}
    print({step: f"{value:.1e}" for step, value in far.items()})
    # each stage from the very checkpoint that it began with, in one process
    first = 0
    for _, stop_at in plan:
        if first:
            check_stage(mine, control.with_name(f"from-{first}"), first, method)
        first = stop_at or spread.STEPS
    return far


def check_stage(mine: Path, alone: Path, first: int, method: str) -> None:
    """The first loss of a stage is that of one process from the same checkpoint."""
    shutil.copytree(mine, alone)
    for saved in (alone / "checkpoints").iterdir():
        if int(saved.name.removeprefix("step-")) > first:
            shutil.rmtree(saved)
    stages(alone, method, [(1, None)], first)
    step = first + 1
    assert toy.losses(mine)[step] == pytest.approx(toy.losses(alone)[step], rel=1e-6)
