"""What tuning found, in the report's words: by hand-made points."""

from __future__ import annotations

from draftsmith.eval.report.pays import _shown
from draftsmith.eval.report.tables import experts_line


def test_the_best_point_of_a_surface_is_its_highest() -> None:
    surface = {"label": "eagle3", "axis": "batch", "points": [[1, 1.2], [2, 1.5], [4, 0.9]], "crosses_1_at": [3.6]}
    shown = _shown(surface)
    assert shown["best"] == [2, 1.5]
    assert "3.6" in shown["pays"]


def test_bytes_of_a_call_are_not_the_experts_that_it_reads() -> None:
    line = experts_line({"read": {"1": 2.0, "5": 6.0}, "call_bytes": {"1": 100, "5": 150}, "of": 8})
    assert "1.50 times the bytes" in line
