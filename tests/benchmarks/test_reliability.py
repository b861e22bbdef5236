"""The table of reliability: its rows find their tests, and its figures are what the tests counted."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from draftsmith.benchmarks import reliability
from draftsmith.benchmarks.common.records import Cell, write_record
from draftsmith.benchmarks.reliability import ROOT, ROWS, assembled, bound, command, described, kept, run, tallying

SOURCE = """
from draftsmith.tests.helpers.reliability_tally import tally

def check(count):
    tally("kills", tried=count, failed=count - 3)

def helper():
    check(4)

def test_first():
    helper()

def test_second():
    tally("recipes", tried=2)

def test_third():
    helper()
    assert False
"""


def test_every_tally_is_of_a_row() -> None:
    names = {row.name for row in ROWS}
    found = {
        path.name: reliability.tallied(path.read_text(encoding="utf-8"))
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert {name: rows - names for name, rows in found.items() if rows - names} == {}
    assert len(set().union(*found.values())) >= 10


def test_a_row_finds_its_tests_by_way_of_helpers() -> None:
    assert tallying(SOURCE, "kills") == ["test_first", "test_third"]
    assert tallying(SOURCE, "recipes") == ["test_second"]
    assert tallying(SOURCE, "disk full") == []


@pytest.mark.slow
def test_a_test_that_fails_has_lost(tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(SOURCE)
    ran = run("kills", [str(path)])
    assert (ran.tried, ran.lost) == (8.0, 2.0), "each tally has lost one of four"
    path.write_text(SOURCE.replace("failed=count - 3", "failed=0"))
    ran = run("kills", [str(path)])
    assert (ran.tried, ran.lost) == (9.0, 1.0), "the test that failed without a word of it"


@pytest.mark.parametrize(("tried", "lost", "expected"), [(500, 0, 0.6), (2, 0, 100.0), (20, 1, 21.6), (5, 5, 100.0)])
def test_the_bound(tried: int, lost: int, expected: float) -> None:
    assert bound(tried, lost) == pytest.approx(expected, abs=0.05)


def test_a_row_alone_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    rows: list[dict[str, Cell]] = [described(row, []) for row in ROWS]
    rows[3] |= {"tried": 7.0, "lost": 0.0, "bound": bound(7, 0), "commit": "abc", "date": "2026-11-22"}
    write_record(tmp_path / "one.json", assembled(rows, argparse.Namespace()))
    assert kept(tmp_path / "one.json") == rows
    assert kept(tmp_path / "none.json") == kept(None) == []
    assert command([]) == "-"
    assert command(["tests/a.py::test_it"]) == "`pytest tests/a.py -k it`"
