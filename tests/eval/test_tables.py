"""The terminal's tables fit 80 columns, and no number is broken over two lines."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from draftsmith.eval.tables import interval, show
from rich.console import Console


def printed(results: dict[str, Any]) -> str:
    out = io.StringIO()
    show(results, Console(file=out, width=80, highlight=False))
    return out.getvalue()


def test_they_fit(measured: tuple[dict[str, Any], dict[str, Any]]) -> None:
    results = copy.deepcopy(measured[0])
    results["rows"].append({**results["rows"][0], "method": "untrained draft"})
    for row in results["rows"]:
        row["verdict"] = "not audited"
        row["tau"] = [1.74, 1.60, 1.93]
    text = printed(results)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("1.74 [1.60, 1.93]") == len(results["rows"])
    for row in results["sweep"]:
        assert interval(row["speedup"]) in text
    assert "best K" in text


def test_degenerate_text_is_called_so(measured: tuple[dict[str, Any], dict[str, Any]]) -> None:
    results = copy.deepcopy(measured[0])
    for row in results["rows"]:
        row["flagged"] = False
    assert "do not believe tau" not in printed(results)
    results["rows"][0]["flagged"] = True
    assert "do not believe tau" in printed(results).replace("\n", " ")


@pytest.mark.parametrize(
    ("value", "text"),
    [([1.724, 1.649, 1.79], "1.72 [1.65, 1.79]"), ([1.5, None, None], "1.50"), ([None] * 3, "-")],
)
def test_interval(value: list[float | None], text: str) -> None:
    assert interval(value) == text
