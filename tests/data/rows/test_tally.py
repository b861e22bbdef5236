"""Counts of the rows that were read, at the edges of what is said of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.data.rows import report
from draftsmith.data.rows.raw import Rejected
from draftsmith.data.rows.report import Tally, _where, left_out


def tally_of(rejected: int, usable: int) -> Tally:
    return Tally(rejected=[Rejected("a.jsonl", line + 1, "no text") for line in range(rejected)], usable=usable)


@pytest.mark.parametrize(
    ("rejected", "usable", "allowed", "too_many"),
    [(1, 9, 0.1, False), (1, 8, 0.1, True), (0, 0, 0.0, False), (1, 9, 0.0, True), (5, 0, 1.0, False)],
)
def test_as_many_bad_rows_as_are_allowed_are_not_too_many(
    rejected: int, usable: int, allowed: float, too_many: bool
) -> None:
    assert tally_of(rejected, usable).too_many(allowed) is too_many


def test_a_verdict_needs_a_thousand_bad_rows() -> None:
    assert not tally_of(999, 0).hopeless(0.1)
    assert tally_of(1000, 0).hopeless(0.1)
    assert not tally_of(1000, 9000).hopeless(0.1)


def test_three_rows_are_named_and_the_others_counted() -> None:
    assert left_out(tally_of(3, 4), "a").splitlines()[0] == "a: 3 of 7 rows cannot be used"
    assert left_out(tally_of(3, 4), "a").splitlines()[-1] == "  a.jsonl:3: no text"
    assert left_out(tally_of(5, 4), "a").splitlines()[-1] == "  ... and 2 more"


def test_four_files_of_a_shape_are_named_and_the_others_counted() -> None:
    assert _where(["a", "b", "c", "d"]) == " in a, b, c, d"
    assert _where(["a", "b", "c", "d", "e", "f"]) == " in a, b, c, d and 2 more files"


def test_each_tenth_of_a_long_source_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(report, "_LONG", 40_000_000)
    caplog.set_level("INFO", "draftsmith")
    for size, told in ((40_000_000, ["4", "8", "36"]), (39_999_999, [])):
        caplog.clear()
        tally, extent = tally_of(0, 5), SimpleNamespace(read=0, size=size)
        sources: Any = {"a": extent}
        tally.extents = sources
        for read in (3_999_999, 4_000_000, 7_999_999, 8_000_000, 36_000_000, size):
            extent.read = read
            tally.say_progress("a")
        assert [line.split()[2] for line in caplog.messages] == told
