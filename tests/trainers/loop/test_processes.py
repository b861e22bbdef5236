"""Several processes of one run: one that stops or dies is named, and one that is poisoned harms no weight."""

from __future__ import annotations

import itertools
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from draftsmith.errors import EnvironmentFailure
from draftsmith.trainers.config import LoopConfig
from draftsmith.trainers.loop import checkpoint, interruptions
from draftsmith.trainers.loop.setup import _group_of
from draftsmith.trainers.loop.sums import hosts, total
from faults import poison, ranks, stalls, toy
from helpers.reliability_tally import tally
from safetensors.torch import load_file
from torch.testing._internal.distributed import fake_pg as _fake_pg  # noqa: F401  the backend `fake`

WAYS = [*itertools.product((0, 1), stalls.PLACES, (stalls.STOP, stalls.KILL))]


def check_named(out: Path, world: int, rank: int, place: str, how: int, silence: float) -> None:
    """The others end, say which one does not answer, and leave whole checkpoints and no process."""
    team = ranks.start(world, stalls.run, out, rank, place, how, silence)
    others = [each for each in range(world) if each != rank]
    for each in others:
        team[each].join()
    assert not (out / f"end-{rank}").exists(), "it was not stopped"
    for each in others:
        assert team[each].exitcode == EnvironmentFailure.exit_code, ranks.error(out, each)
        assert f"process {rank} of {world} (counted from 0) does not answer" in ranks.error(out, each)
        assert "--resume auto" in ranks.error(out, each)
    team[rank].kill()  # a launcher does it
    team[rank].join()
    late = [each for each in others if stalls.waited(out, each) > stalls.BOUND + 10]
    assert checkpoint.newest(out / "checkpoints") is not None
    tally("stopped processes", tried=1, failed=bool(late))


@pytest.mark.slow
def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    check_named(tmp_path, 2, 1, "step", signal.SIGSTOP, silence=2.0)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "place", "how"), WAYS)
def test_a_process_that_stops_or_dies_anywhere(rank: int, place: str, how: int, tmp_path: Path) -> None:
    check_named(tmp_path, 2, rank, place, how, silence=5.0)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "place"), itertools.product(range(4), ("rows", "step")))
def test_one_of_four_that_stops(rank: int, place: str, tmp_path: Path) -> None:
    check_named(tmp_path, 4, rank, place, signal.SIGSTOP, silence=5.0)


def test_a_process_counts_on_where_another_one_removed_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruptions, "_SILENCE", 2.0)
    team: Any = SimpleNamespace(num_processes=2, process_index=0)
    with interruptions.name_the_silent(tmp_path, team, bound=1):
        shutil.rmtree(tmp_path / ".alive", ignore_errors=True)
        assert interruptions.silent(tmp_path / ".alive", 2) == [1]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize(("how", "words"), [("alive", "alive and busy"), ("stopped", "process 0 of 2")])
def test_waiting_for_data_has_the_same_bound(how: str, words: str, tmp_path: Path) -> None:
    """All wait for process 0 while it prepares the rows."""
    team = ranks.start(2, stalls.prepare, tmp_path, how, 5.0)
    team[1].join()
    assert team[1].exitcode == EnvironmentFailure.exit_code, ranks.error(tmp_path, 1)
    assert words in ranks.error(tmp_path, 1)
    team[0].kill()
    team[0].join()
    tally("stopped processes", tried=1)


@pytest.mark.parametrize("seconds", [600, 1800, 7])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_bound_reaches_the_group(seconds: int, on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate leaves out what equals a default of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    (group,) = _group_of(LoopConfig(stall_seconds=seconds), on_cpu=on_cpu)
    given = group.to_kwargs()
    assert given["timeout"].total_seconds() == pytest.approx(seconds, abs=0.01)
    assert given.get("backend") == ("gloo" if on_cpu else None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert _group_of(LoopConfig(), on_cpu=True) == []


def test_of_three_processes_buckets_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are ordered by decides how a sum of three numbers is rounded, and a resumed run begins anew."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    _, ddp = _group_of(LoopConfig(), on_cpu=True)
    assert ddp.to_kwargs() == {"find_unused_parameters": True}


@pytest.mark.parametrize(
    ("still", "reason", "said"),
    [
        ([1], "Timed out", r"process 1 of 3 \(counted from 0\) does not answer"),
        ([0, 2], "closed", r"process 0, 2 of 3 \(counted from 0\) does not answer"),
        ([], "Timed out", "waited 20 seconds for another one, which is alive and busy"),
        ([0, 1, 2], "a timeout", "waited 20 seconds for another one, which is alive and busy"),
        ([], "closed", None),
        ([0, 1, 2], "closed", None),
    ],
)
def test_a_process_is_named_where_others_count_up(
    still: list[int], reason: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all do, none is silent; where none does, the folder or this machine is at fault."""
    monkeypatch.setattr(interruptions, "silent", lambda *_: still)
    if said is None:
        interruptions._explain(RuntimeError(reason), Path(), 3, 20)
        return
    with pytest.raises(EnvironmentFailure, match=said):
        interruptions._explain(RuntimeError(reason), Path(), 3, 20)


def test_numbers_of_the_host_are_added_up_on_the_hosts(tmp_path: Path) -> None:
    """Where processes are joined by their devices, hosts have a group of their own; made once, and none where they are."""
    bound = timedelta(seconds=7)
    for backend in ("fake", "gloo"):
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.FileStore(str(tmp_path / backend)))
        try:
            world: Any = dist.group.WORLD
            group = hosts(world, bound)
            assert dist.get_backend(group) == "gloo"
            assert hosts(world, bound) is group
            assert (group is world) == (backend == "gloo")
            team: Any = SimpleNamespace(num_processes=2, init_handler=SimpleNamespace(timeout=bound))
            assert total(team, 3.5) == 3.5
        finally:
            dist.destroy_process_group()


def check_skipped(out: Path, world: int, steps: int) -> None:
    """Every poisoned step left every weight as it was, on every process, and the processes agree to the bit."""
    ranks.run(world, poison.run, out, steps)
    first, *others = (load_file(out / f"weights-{rank}.safetensors") for rank in range(world))
    assert all(map(poison.is_finite, first.values()))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    tally("non-finite steps", tried=steps // 2)


@pytest.mark.slow
def test_a_step_that_is_not_finite_on_one_process_is_skipped_on_all(tmp_path: Path) -> None:
    check_skipped(tmp_path, 2, 24)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "steps"), [(1, 600), (2, 1400)])
def test_a_thousand_steps_that_are_not_finite(world: int, steps: int, tmp_path: Path) -> None:
    check_skipped(tmp_path, world, steps)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [0, 1])
def test_a_weight_that_turns_non_finite_reaches_no_checkpoint(broken: int, tmp_path: Path) -> None:
    for process in (team := ranks.start(2, poison.broken_weight, tmp_path, broken, 4)):
        process.join()
    assert all(process.exitcode for process in team)
    told = ranks.error(tmp_path, 0)
    expected = "TrainingFailed: behind step 5" if broken == 0 else "4 non-finite steps in a row"
    assert expected in told, told
    for saved in (tmp_path / "checkpoints").glob("step-*"):
        assert all(map(poison.is_finite, load_file(saved / "model.safetensors").values()))
    assert len([*(tmp_path / "checkpoints").glob("step-*")]) >= 4
    toy.run(toy.loop_in(tmp_path, "medusa", every=1, keep=20))
    tally("non-finite weights", tried=1)
