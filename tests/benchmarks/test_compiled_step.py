"""A step with `loop.compile` beside one without: which rounds count, and a small try."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
from draftsmith.benchmarks.common.records import read_record
from draftsmith.trainers.loop import compiled
from helpers.benchmark_scripts import load

compiled_step = load("compiled_step")


class Scripted:
    """Steps of known seconds: the compiler's take half as long, and a hundred where a shape is new."""

    def __init__(self, _recipe: str, _folder: Path, compile: str, new: dict[str, str]) -> None:
        self.mine, self.new = compile == "true", {int(at) for at in new}
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.graphs: list[int] = []

    def step(self) -> None:
        at = len(self.seconds)
        is_new = self.mine and at in self.new
        self.seconds.append(100.0 if is_new else 1.0 if self.mine else 2.0)
        self.losses.append(1.001 if self.mine and at == 3 else 1.0)
        self.graphs.append((self.graphs[-1] if self.graphs else 0) + is_new)


def row(monkeypatch: pytest.MonkeyPatch, new: set[int]) -> Any:
    monkeypatch.setattr(compiled_step, "Arm", Scripted)
    given = argparse.Namespace(warm=2, rounds=4, set=dict.fromkeys(map(str, new), ""))
    return compiled_step.row("a recipe", given)


def test_rounds_with_a_new_shape_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = row(monkeypatch, {0, 4})
    assert (found["time"].value, found["plain_s"]) == (0.5, 2.0)
    assert (found["graphs"], found["left_out"]) == (2, 1)
    assert found["compiling_s"] == pytest.approx(198.0)
    assert found["differ"] == pytest.approx(1e-3)


def test_where_no_round_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="take more --warm"):
        row(monkeypatch, {2, 3, 4, 5})


@pytest.mark.slow
@pytest.mark.run
def test_a_small_try(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without inductor, whose kernels take a minute on a CPU."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    out = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["compiled_step.py", "--recipes", "medusa-tiny", "--tiny", "--json", str(out)])
    compiled_step.main()
    (found,) = read_record(out).rows
    time: Any = found["time"]
    assert found["recipe"] == "medusa-tiny"
    assert time.value > 0
    assert float(str(found["graphs"])) >= 1
    assert float(str(found["differ"])) < 1e-4
