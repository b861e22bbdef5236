"""A long run holds no more memory and no more files at its end than near its beginning."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
from faults import toy
from helpers.reliability_tally import tally


def held_after(out: Path, looks: list[int], **values) -> dict[int, tuple[int, int]]:
    """Step -> resident bytes and open files of this process, behind those steps of one run."""
    process, found = psutil.Process(), dict[int, tuple[int, int]]()

    def look(step: int) -> None:
        if step in looks:
            gc.collect()
            found[step] = process.memory_info().rss, process.num_fds()

    toy.run(toy.loop_in(out, **values), watch=look)
    return found


def test_open_files_stay(tmp_path: Path) -> None:
    held = held_after(tmp_path, [20, 59], steps=60, every=10, validate_every=10)
    assert held[20][1] == held[59][1]


@pytest.mark.slow
def test_twenty_thousand_steps(tmp_path: Path) -> None:
    first, last = 2000, 19_999
    held = held_after(tmp_path, [first, last], steps=20_000, every=500, validate_every=500, log_every=100)
    (before, files), (behind, files_behind) = held[first], held[last]
    print(f"{before} bytes behind step {first}, {behind} behind step {last}, {behind / before - 1:.3%}")
    assert files == files_behind
    assert behind < 1.01 * before
    tally("flat memory", tried=20_000)
