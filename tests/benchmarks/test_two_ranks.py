"""The table of two processes: what counts as a difference, and one cell of it through the real command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.benchmarks.common.noted_run import Noted, read_rows
from draftsmith.benchmarks.common.records import read_record
from draftsmith.trainers.methods import METHODS
from helpers.benchmark_scripts import SCRIPTS, load
from safetensors.torch import save_file

two_ranks = load("two_ranks")
ALONE = {("m", "train", 1): {"loss": 2.0, "grad_norm": 0.001}, ("m", "probe", 1): {"tau": 1.5}}


def test_the_largest_difference_is_named() -> None:
    mine = {key: dict(values) for key, values in ALONE.items()}
    assert two_ranks.difference(mine, ALONE) == (0.0, "")
    mine["m", "train", 1] |= {"loss": 2.002, "grad_norm": 0.00102}
    far, name = two_ranks.difference(mine, ALONE)
    assert (far, name) == (pytest.approx(0.002), "grad_norm")  # of the least that counts, .01
    del mine["m", "probe", 1]  # a cut target decodes nothing
    assert two_ranks.difference(mine, ALONE) == (pytest.approx(0.002), "grad_norm")
    later = ("m", "train", 2)
    records = [{**each, later: {"loss": loss}} for each, loss in ((mine, 1.0), (ALONE, 3.0))]
    assert two_ranks.difference_text(*map(two_ranks.first_step, records)) == "2.0e-03 (grad_norm)"
    assert two_ranks.difference_text(ALONE, ALONE) == "none"


@pytest.mark.parametrize(
    "change",
    [
        lambda mine: mine.clear(),
        lambda mine: mine.pop(("m", "train", 1)),
        lambda mine: mine["m", "train", 1].popitem(),
    ],
)
def test_a_report_that_lacks_something_is_no_equal_run(change: Callable[[Any], Any]) -> None:
    mine = {key: dict(values) for key, values in ALONE.items()}
    change(mine)
    with pytest.raises(SystemExit, match="not the same"):
        two_ranks.difference(mine, ALONE)


class Plain:
    """Rows without content."""

    def __len__(self) -> int:
        return 9

    def batch(self, _rows: list[int]) -> dict[str, torch.Tensor]:
        return {}


def run_of(folder: Path, *asked: list[list[int]], said: str = "", code: int = 0) -> Any:
    folder.mkdir()
    for rank, batches in enumerate(asked):
        rows = Noted(Plain(), folder / f"rows-{rank}")
        for each in batches:
            rows.batch(each)
        (folder / f"code-{rank}").write_text(str(code))
    return two_ranks.Run(folder, folder, said)


def test_rows_are_counted_over_all_processes(tmp_path: Path) -> None:
    alone = run_of(tmp_path / "alone", [[0, 1], [2, 3]])
    assert sorted(read_rows(alone.notes)) == [0, 1, 2, 3]
    assert two_ranks.rows_text(run_of(tmp_path / "two", [[0], [2]], [[1], [3]]), alone) == "4 of 4"
    twice = run_of(tmp_path / "twice", [[0], [2]], [[0], [3]])
    assert two_ranks.rows_text(twice, alone) == "3 of 4, and 1 too many"


def test_a_refusal_is_told_from_a_failure(tmp_path: Path) -> None:
    said = "draftsmith: no team\nof two; launch two\nE1124 23:00 elastic says more"
    refused = run_of(tmp_path / "refused", [], [], said=said, code=2)
    assert refused.refusal() == "refused: no team of two"
    failed = run_of(tmp_path / "failed", [], [], said="a trace", code=1)
    assert failed.refusal() is None
    with pytest.raises(SystemExit, match="has failed:\na trace"):
        failed.or_stop()


def test_what_is_held_is_read_off_the_log() -> None:
    said = "target.sharding is fully_shard: 3.00 M of the target's 4.00 M numbers on each of 2 processes; held-out"
    assert two_ranks.held(said) == "0.75 (3.00 of 4.00 M numbers)"
    assert two_ranks.held("") == "all"


def test_drafters_are_compared_to_the_bit(tmp_path: Path) -> None:
    for name, value in {"one": 1.0, "same": 1.0, "other": 1.5}.items():
        (tmp_path / name / "drafter").mkdir(parents=True)
        (tmp_path / name / "checkpoints").mkdir()
        save_file({"w": torch.tensor([value])}, tmp_path / name / "drafter" / "model.safetensors")
        save_file({"w": torch.tensor([len(name)])}, tmp_path / name / "checkpoints" / "state.safetensors")
    assert two_ranks.drafter_text(tmp_path / "same", tmp_path / "one") == "the same bits"
    assert two_ranks.drafter_text(tmp_path / "other", tmp_path / "one") == "differs by 5.0e-01"
    with pytest.raises(SystemExit, match="have not exported the same"):
        two_ranks.drafter_text(tmp_path / "none", tmp_path / "none")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_reads_its_small_settings(method: str, tmp_path: Path) -> None:
    """A recipe of its shipped one and these is complete; what is not read would be refused."""
    args = two_ranks.argparse.Namespace(out=tmp_path, set=[])
    values = two_ranks.settings_of(method, two_ranks.ONE, args)
    flags = [(name, two_ranks.as_setting(value)) for name, value in values.items()]
    recipe = two_ranks.load_recipe(f"{method}-tiny", flags).recipe
    assert recipe.method == method
    assert recipe.loop.steps == two_ranks.STEPS > two_ranks.KILLED_AT > two_ranks.EVERY
    assert not set(two_ranks.OWN.get(method, {})) - set(values)


@pytest.mark.slow
@pytest.mark.run
def test_a_cell_through_the_command_line(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path / "out"), "--methods", "medusa", "--ways", "fully_shard"]
    words += ["--json", str(tmp_path / "record.json")]
    done = subprocess.run([sys.executable, str(SCRIPTS / "two_ranks.py"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = read_record(tmp_path / "record.json").rows
    assert str(row["held"]).startswith("0.")
    assert row["rows"] == "32 of 32"
    assert row["resumed"] == "the same bits"
    for name in ("first", "difference"):
        assert row[name] == "none" or float(str(row[name]).split()[0]) < 1e-4
    kept = json.loads((tmp_path / "out" / "cells" / "medusa-fully-shard.json").read_text())
    assert kept.items() <= row.items()
