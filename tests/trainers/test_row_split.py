"""Rows that several processes share: the loss and every gradient of whole rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.errors import RequestError
from draftsmith.launch.check.unread import check_read
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.config import LoopConfig
from draftsmith.trainers.loop.setup import accumulation
from draftsmith.trainers.teacher.features import StoredFeatures
from faults import ranks, row_ranks, toy

CLOSE = 1e-6


def check_bug(found: dict[str, float]) -> None:
    assert found["gradients"] > 1e-3, "the planted bug went unseen"


@pytest.mark.parametrize("case", row_ranks.CASES)
def test_parts_learn_what_whole_rows_do(case: str) -> None:
    """EAGLE-1, HASS, EAGLE-3 and MTP, on packed rows and odd ones, in threads."""
    whole, *parts = (row_ranks.goal_of(case) for _ in range(3))
    for rows in row_ranks.ROWS:
        wanted = row_ranks.learnt(whole, row_ranks.rows_of(rows))
        for found in row_ranks.Threads(2).far(parts, rows, wanted):
            assert max(found.values()) < CLOSE, (rows, found)


@pytest.mark.parametrize("case", row_ranks.CASES)
def test_what_is_reported_depends_on_no_neighbours(case: str) -> None:
    """Rows with other numbers of labels at every pass: together they report what they report alone."""
    goal = row_ranks.goal_of(case)
    rows = row_ranks.rows_of("packed")
    together, _ = row_ranks.learnt(goal, rows)
    apart = []
    for row in range(2):
        found, _ = row_ranks.learnt(goal, {name: each[row : row + 1] for name, each in rows.items()})
        apart.append(found)
    for name, value in together.items():
        assert float(value) == pytest.approx(sum(float(each[name]) for each in apart), rel=1e-4), name


def test_planted_bugs_are_seen() -> None:
    whole, *parts = (row_ranks.goal_of("eagle3") for _ in range(3))
    wanted = row_ranks.learnt(whole, row_ranks.rows_of("one document"))
    for planted in row_ranks.BUGS.values():
        with planted():
            for found in row_ranks.Threads(2).far(parts, "one document", wanted):
                check_bug(found)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "parts"), [(2, 2), (4, 4), (4, 2), (3, 3)])
def test_processes_and_groups_learn_what_one_does(world: int, parts: int, tmp_path: Path) -> None:
    """The same over gloo, where a process of the second group is not the process of that number."""
    ranks.run(world, row_ranks.compare, tmp_path, parts)
    for rank in range(world):
        said = json.loads((tmp_path / f"said-{rank}.json").read_text())
        assert len(said["cases"]) == len(row_ranks.CASES) * len(row_ranks.ROWS)
        far = {case: each for case, each in said["cases"].items() if max(each.values()) >= CLOSE}
        assert not far
        for found in said["bugs"].values():
            check_bug(found)


def test_a_method_without_parts_is_refused() -> None:
    loop = LoopConfig(context_parallel=2)
    check_read(Recipe(method="eagle", loop=loop))
    check_read(Recipe(method="eagle3", loop=loop))
    check_read(Recipe(method="mtp", loop=loop))
    with pytest.raises(
        RequestError, match=r"loop.context_parallel is 2.*`medusa`.*train with `eagle` or `eagle3` or `mtp`"
    ):
        check_read(Recipe(method="medusa", loop=loop))


def test_a_batch_is_counted_in_groups() -> None:
    loop = LoopConfig(context_parallel=2, batch_rows=8, micro_rows=2)
    assert [accumulation(loop, world) for world in (2, 4, 8)] == [4, 2, 1]
    with pytest.raises(RequestError, match=r"\(2\) x groups of 2 processes \(3\) = 6; try --loop.batch_rows 6"):
        accumulation(loop, 6)


def kept(out: Path) -> dict[int, dict[str, float]]:
    """The records of steps and validations, without clocks."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    plain: dict[int, dict[str, float]] = {}
    for line in lines:
        values = {name: each for name, each in line.items() if "loss" in name or "alpha" in name or "agree" in name}
        plain.setdefault(line["step"], {}).update(values)
    return plain


def check_same_run(mine: Path, alone: Path) -> None:
    found, wanted = kept(mine), kept(alone)
    assert found.keys() == wanted.keys() == set(range(1, toy.STEPS + 1))
    assert "validation_loss" in wanted[toy.STEPS]
    for step, values in wanted.items():
        assert found[step] == pytest.approx(values, rel=1e-4), step


@pytest.mark.slow
@pytest.mark.parametrize(("world", "parts"), [(2, 2), (4, 2)])
def test_a_run_that_shares_rows_is_that_of_one_process(world: int, parts: int, tmp_path: Path) -> None:
    """Row order, losses, validation; and a stopped run goes on to the same bits."""
    for name, how in {"alone": (1, 1), "shared": (world, parts), "stopped": (world, parts)}.items():
        ranks.run(how[0], row_ranks.train, tmp_path / name, how[1], *([7] if name == "stopped" else []))
    check_same_run(tmp_path / "shared", tmp_path / "alone")
    rows = [json.loads((tmp_path / "shared" / f"rows-{rank}").read_text()) for rank in range(world)]
    assert all(rows[rank] == rows[rank - rank % parts] for rank in range(world))
    (whole,) = [json.loads((tmp_path / "alone" / "rows-0").read_text())]
    assert sorted(sum(rows[::parts], [])) == sorted(whole)
    ranks.run(world, row_ranks.train, tmp_path / "stopped", parts)
    assert toy.state_files(tmp_path / "stopped") == toy.state_files(tmp_path / "shared")
    # and in one process, from the same checkpoint
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / f"step-{toy.STEPS:08d}")
    ranks.run(1, row_ranks.train, tmp_path / "stopped", 1)
    check_same_run(tmp_path / "stopped", tmp_path / "alone")


@pytest.mark.slow
def test_an_objective_without_parts_is_refused(tmp_path: Path) -> None:
    team = ranks.start(2, row_ranks.refuse, tmp_path)
    for process in team:
        process.join()
    for rank in range(2):
        told = ranks.error(tmp_path, rank)
        assert "loop.context_parallel is 2" in told
        assert "methods eagle, eagle3, mtp can cut them" in told


def test_parts_of_a_row_are_stored_under_their_first_and_last_token() -> None:
    """Halves and quarters begin alike; a whole row has its own key."""

    def named(is_whole: bool, *ends: int) -> str:
        source: Any = SimpleNamespace(part=SimpleNamespace(is_whole=is_whole))
        return StoredFeatures._name(source, "key", slice(*ends))

    assert [named(False, 0, 8), named(False, 0, 4), named(False, 4, 8)] == ["key-0-8", "key-0-4", "key-4-8"]
    assert named(True, 0, 16) == "key"
