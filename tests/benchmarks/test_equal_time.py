"""Equal training time: steps from a short timed run, kept; what the table of families says of first drafts and cost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.benchmarks import families
from draftsmith.benchmarks.common import equal_time
from draftsmith.benchmarks.common.acceptance import Sums
from draftsmith.benchmarks.common.shapes import FAMILIES

BY_NAME = {each.name: each for each in FAMILIES}
ARGS = {"steps": 400, "wall": None, "speed": True, "shapes": ["chain"]}


def sums(passed: list[int]) -> Sums:
    """Of prompts whose first draft was tested ten times."""
    return {
        "passed_by_depth": [[each, 0] for each in passed],
        "tested_by_depth": [[10, each] for each in passed],
        "emitted": [10 + each for each in passed],
        "steps": [10 for _ in passed],
    }


def measured(passed: list[int], **more: Any) -> dict[str, Any]:
    chain = {"0": sums(passed)}
    return {
        "trained": {"chain": chain},
        "untrained": chain,
        "audits": {"chain": ["lossless", 0.07]},
        "speeds": {"chain 0": [[1.2, 1.1, 1.3], 1.25]},
        "run": "run",
        **more,
    }


def test_as_many_steps_as_fit_and_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(equal_time, "seconds_of", lambda run: {"first": 5.0, "second": 15.0}[run.name])

    def train(steps: int) -> list[Path]:
        asked.append(steps)
        return [tmp_path / "first", tmp_path / "second"]

    place = tmp_path / "steps.json"
    assert equal_time.steps_within(60, place, train) == 3 * equal_time.TIMED, "20 s for the timed run, 60 s to spend"
    assert json.loads(place.read_text())["seconds_of_a_step"] == pytest.approx(20 / equal_time.TIMED)
    assert equal_time.steps_within(60, place, train) == 3 * equal_time.TIMED
    assert asked == [equal_time.TIMED], "timed once"
    with pytest.raises(SystemExit, match=r"--wall 0.5: 1 steps fit"):
        equal_time.steps_within(0.5, tmp_path / "few.json", train)


def test_runs_of_equal_time_have_files_of_their_own(tmp_path: Path) -> None:
    """Equal steps and equal time share a folder and its runs, and no measurement."""
    equal_steps = argparse.Namespace(**ARGS, out=tmp_path)
    in_time = argparse.Namespace(**(ARGS | {"wall": 600.0}), out=tmp_path)
    names = {families.measured_file(BY_NAME["DFlash 2"], each).name for each in (equal_steps, in_time)}
    assert names == {"dflash-2.json", "dflash-2-wall-600.json"}
    assert "steps" in families.heads(in_time, FAMILIES)
    assert "steps" not in families.heads(equal_steps, FAMILIES)


def test_first_drafts_of_block_drafters_stand_beside_eagle3s() -> None:
    of = {"EAGLE-3": [4, 6, 5], "DFlash": [5, 7, 6], "EAGLE-1": [9, 9, 9]}
    by_family = {BY_NAME[name]: [measured(passed)] for name, passed in of.items()}
    gates = {each.name: families.gate(each, by_family, 0.0)["n_alpha_less_eagle3"] for each in by_family}
    assert gates["EAGLE-1"] is None
    assert gates["EAGLE-3"] is None
    found = gates["DFlash"]
    assert found is not None
    assert [found.value, found.low, found.high] == pytest.approx([0.1, 0.1, 0.1]), "paired by prompt"
    without = {each: of_seeds for each, of_seeds in by_family.items() if each.name != "EAGLE-3"}
    assert families.gate(BY_NAME["DFlash"], without, 0.0)["n_alpha_less_eagle3"] is None
    assert "depth 1 less EAGLE-3's" in families.heads(argparse.Namespace(**ARGS), list(by_family))
    assert "depth 1 less EAGLE-3's" not in families.heads(argparse.Namespace(**ARGS), list(without))


def test_the_cost_of_drafting_is_a_column_and_old_measurements_are_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "seconds_of", lambda run: 30.0)
    family = BY_NAME["DFlash"]
    new = families.row_of(family, [measured([5], passes={"chain 0": [0.3, 1.0]})], 0.0)
    assert [new["c_chain"], new["passes_chain"], new["seconds"]] == [0.3, 1.0, 30.0]
    old = families.row_of(family, [measured([5])], 0.0)
    assert old["c_chain"] is None
    assert old["speedup_chain"] == new["speedup_chain"]
    for speed in (True, False):
        heads = families.heads(argparse.Namespace(**(ARGS | {"speed": speed})), [family])
        assert "training" in heads
        assert ("target calls of a draft (c x passes)" in heads) == speed
