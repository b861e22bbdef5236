"""Surfaces of a tuned run as a record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from draftsmith.benchmarks.common.markdown import lines_of
from draftsmith.benchmarks.common.records import read_record
from helpers.benchmark_scripts import MACHINE, load

BATCH = {
    "method": "runs/one/drafter",
    "label": "eagle, chain of 3",
    "axis": "batch",
    "points": [[1, 1.5], [8, 0.9]],
    "crosses_1_at": [5.8],
}


def tuned(folder: Path, surfaces: list[dict[str, Any]]) -> Path:
    """A run folder with what the record reads."""
    content = {
        "sentence": "eagle, chain of 3: 1.5 times",
        "temperature": 0.0,
        "batch": 1,
        "max_new_tokens": 64,
        "verdict": "not audited",
        "surfaces": surfaces,
        "environment": MACHINE,
    }
    for part in ("eval", "drafter"):
        (folder / part).mkdir(parents=True)
    (folder / "eval" / "tune.json").write_text(json.dumps(content))
    (folder / "drafter" / "config.json").write_text("run")
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    module = load("surfaces")
    monkeypatch.setattr(sys, "argv", ["surfaces.py", *words])
    module.main()


def test_every_surface_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tuned(tmp_path / "one", [BATCH, BATCH | {"axis": "context", "points": []}])
    call(monkeypatch, str(run), "--json", str(tmp_path / "surfaces.json"))
    record = read_record(tmp_path / "surfaces.json")
    assert lines_of(record.tables["surfaces"], record)[2:] == [
        "| eagle, chain of 3 | batch | 1: 1.50, 8: 0.90 | pays up to batch 5.8 |"
    ]
    assert record.notes == ["What tuning found: eagle, chain of 3: 1.5 times."]


def test_a_run_without_surfaces_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="tune without --no-surfaces"):
        call(monkeypatch, str(tuned(tmp_path / "one", [])))
    with pytest.raises(SystemExit, match=r"tune\.json does not exist; `draftsmith tune"):
        call(monkeypatch, str(tmp_path))
