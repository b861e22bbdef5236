"""Every cut of a run, and cuts of what was resumed: weights, moments, losses and rows bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from draftsmith.errors import Stopped
from faults import toy
from helpers.reliability_tally import tally

SETTINGS = [
    (method, precision, micro)
    for method in ("target", "medusa", "eagle")
    for precision in ("fp32", "bf16")
    for micro in (2, 8)  # accumulation over four micro-batches, and none
]
FEW = ("eagle", "bf16", 2)


def stopped_at(out: Path, method: str, cuts: tuple[int, ...], **values) -> list[int]:
    """A run that is stopped behind each of the cuts and goes on; the rows that it trained on."""
    seen: list[int] = []
    for first, cut in zip((0, *cuts), (*cuts, None)):
        loop = toy.loop_in(out, method, **values)
        if cut is None:
            toy.run(loop)
        else:
            with pytest.raises(Stopped, match=f"after step {cut} of"):
                toy.run(loop, stop_at=cut)
        behind = values["steps"] if cut is None else cut
        # a look at the next step's rows may have been cut off
        seen += loop.train_rows.asked[: (behind - first) * toy.BATCH]
    return seen


def check_cuts(folder: Path, setting: tuple[str, str, int], steps: int, each: list[tuple[int, ...]]) -> None:
    """Each way of cutting the run ends as the whole one does."""
    method, precision, micro = setting
    values = {"steps": steps, "precision": precision, "micro_rows": micro}
    rows = stopped_at(folder / "whole", method, (), **values)
    assert len(rows) == steps * toy.BATCH
    expected = toy.state_files(folder / "whole", steps), toy.losses(folder / "whole")
    for cuts in each:
        out = folder / "cut"
        assert stopped_at(out, method, cuts, **values) == rows, cuts
        assert (toy.state_files(out, steps), toy.losses(out)) == expected, cuts
        shutil.rmtree(out)


def test_a_few_cuts(tmp_path: Path) -> None:
    cuts = [(1,), (7,)]
    check_cuts(tmp_path, FEW, toy.STEPS, cuts)
    tally("exact resume", tried=len(cuts))


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_cut(setting: tuple[str, str, int], tmp_path: Path) -> None:
    cuts = [(cut,) for cut in range(1, 40)]
    check_cuts(tmp_path, setting, 40, cuts)
    tally("exact resume", tried=len(cuts))


def test_two_cuts_at_the_ends_of_epochs(tmp_path: Path) -> None:
    """Five steps see all rows once."""
    assert toy.ROWS == 5 * toy.BATCH
    check_cuts(tmp_path, FEW, toy.STEPS, [(5, 10)])
    tally("resume of a resume", tried=1)


@pytest.mark.slow
def test_every_two_cuts(tmp_path: Path) -> None:
    pairs = [(first, second) for second in range(1, 12) for first in range(1, second)]
    check_cuts(tmp_path, FEW, toy.STEPS, [*pairs, *((first, first + 1, first + 2) for first in range(1, 10))])
    tally("resume of a resume", tried=len(pairs) + 9)


def check_equal_runs(folder: Path, method: str, times: int) -> None:
    """The same run in so many folders, to the same bits."""
    ends = []
    for number in range(times):
        out = folder / str(number)
        toy.run(toy.loop_in(out, method, precision="bf16"))
        ends.append((toy.state_files(out), toy.losses(out)))
    assert all(end == ends[0] for end in ends)


def test_the_same_run_again(tmp_path: Path) -> None:
    check_equal_runs(tmp_path, "eagle", 2)
    tally("determinism", tried=1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["target", "medusa", "hydra", "bpd", "eagle"])
def test_the_same_run_five_times(method: str, tmp_path: Path) -> None:
    check_equal_runs(tmp_path, method, 5)
    tally("determinism", tried=4)
