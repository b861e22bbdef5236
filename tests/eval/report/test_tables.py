"""The terminal's tables fit 80 columns, and no number is cut or broken over two lines."""

from __future__ import annotations

import copy
import io
import math
import re
from typing import Any

import pytest
from draftsmith.eval.report.tables import accuracy, interval, number, off, show
from rich.cells import cell_len
from rich.console import Console

Measured = tuple[dict[str, Any], dict[str, Any]]


def printed(results: dict[str, Any], width: int = 80) -> str:
    out = io.StringIO()
    show(results, Console(file=out, width=width, highlight=False))
    return out.getvalue()


@pytest.fixture
def results(measured: Measured) -> dict[str, Any]:
    return copy.deepcopy(measured[0])


def test_they_fit(results: dict[str, Any]) -> None:
    results["rows"].append({**results["rows"][0], "method": "untrained draft"})
    for row in results["rows"]:
        row |= {"verdict": "not audited", "tau": [1.74, 1.60, 1.93], "flagged": False}
    text = printed(results)
    assert max(map(cell_len, text.splitlines())) <= 80
    assert text.count("1.74 [1.60, 1.93]") == len(results["rows"])
    # short names stay on one line, beside their numbers
    assert sum("untrained draft" in line for line in text.splitlines()) == 3
    for unit in ("tokens/call", "accepted", "%", "times", "tokens/s", "calls"):
        assert unit in text
    for row in results["sweep"]:
        assert interval(row["tau"]) in text
        assert interval(row["alpha"]) in text
        assert interval(row["speedup"]) in text
    best = max(results["sweep"], key=lambda row: row["speedup"][0])["draft_length"]
    assert f"{best} measured" in text


@pytest.mark.parametrize(
    "name", ["x" * 70, "a draft model with quite a long name, K = 16", "猫" * 20, "[/bold] [red]"]
)
def test_the_widest_numbers_stay_whole(name: str, results: dict[str, Any]) -> None:
    """A long name gives way, a number never; brackets in a name are no markup."""
    wide = [12.34, 11.11, 13.45]
    for row in results["rows"]:
        row |= {
            "method": name,
            "temperature": 0.75,
            "verdict": "NOT lossless",
            "tau": wide,
            "alpha": [0.44, 0.38, 0.51],
            "loop_share": 1.0,
            "flagged": True,
            "speedup": wide,
            "predicted_speedup": 12.34,
            "tokens_per_second": 123_456.7,
            "n_alpha": [[0.11 * n, 0.0, 1.0] for n in range(1, 9)],
            "c": 10.25,
            "c_v": 11.75,
            "draft_length": 16,
        }
    for row in results["sweep"]:
        row |= {
            "tau": wide,
            "speedup": wide,
            "predicted_speedup": 12.34,
            "draft_length": 16,
            "verdict": "NOT lossless",
        }
    lines = printed(results).splitlines()
    assert max(map(cell_len, lines)) <= 80
    rows, sweep = len(results["rows"]), len(results["sweep"])
    depths = [number(0.11 * n) for n in range(1, 7)]
    assert sum(all(cell in line for cell in (*depths, "NOT lossless")) for line in lines) == rows
    assert not any(number(0.77) in line for line in lines)
    assert sum(line.count("12.34 [11.11, 13.45]") for line in lines) == 2 * rows + 2 * sweep
    whole = ("0.75", "0.44 [0.38, 0.51]", "! 100", "NOT lossless")
    assert sum(all(cell in line for cell in whole) for line in lines) == rows
    speed = ("0.75", "16", "12.34", "123,457", "10.25", "11.75")
    assert sum(all(cell in line for cell in speed) for line in lines) == rows
    assert name.replace(" ", "")[:10] in "".join(lines).replace(" ", "")


def test_a_narrow_terminal_cuts_no_number(results: dict[str, Any]) -> None:
    text = printed(results, width=50)
    for row in (*results["rows"], *results["sweep"]):
        for measure in ("tau", "alpha", "speedup"):
            assert f"{interval(row[measure])} " in text
        assert re.search(rf"{re.escape(number(row['predicted_speedup']))}\s", text)


def test_degenerate_text_is_called_so(results: dict[str, Any]) -> None:
    for row in results["rows"]:
        row["flagged"] = False
    plain = printed(results)
    assert "do not believe tau" not in plain
    assert "!" not in plain
    results["rows"][0]["flagged"] = True
    flagged = printed(results)
    assert "do not believe tau" in flagged.replace("\n", " ")
    assert f"! {100 * results['rows'][0]['loop_share']:.0f}" in flagged


def test_the_verdict_stands_with_every_acceptance(results: dict[str, Any]) -> None:
    for verdict in ("lossless", "NOT lossless", "not audited"):
        for row in (*results["rows"], *results["sweep"], *results["second"]):
            row["verdict"] = verdict
        text = printed(results)
        assert text.count(verdict) == 2 * len(results["rows"]) + len(results["second"]) + 1
        assert f"(audit: {verdict})" in text


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([(1.09, 1.0), (0.91, 1.0), (1.2, 1.0)], "2 of 3 rows; off by +9, -9, +20 %, +7 % on average"),
        ([(1.5, 1.5), (None, 1.0), (1.0, None)], "1 of 1 rows; off by +0, -, - %, +0 % on average"),
        ([(math.nan, 1.0)], "nothing was timed"),
    ],
)
def test_predictions_against_what_was_measured(pairs: list[tuple[float | None, float | None]], text: str) -> None:
    assert text in accuracy(pairs)


def test_how_far_a_prediction_is_off() -> None:
    assert [off(1.57, 1.43), off(0.8, 1.0), off(1.0, 1.0), off(None, 1.0), off(1.0, 0.0)] == [
        "+10",
        "-20",
        "+0",
        "-",
        "-",
    ]


def test_acceptance_by_depth(results: dict[str, Any]) -> None:
    """A shallower method leaves its place empty, what was never tested is a dash."""
    results["rows"][0]["n_alpha"] = [[0.81, 0.7, 0.9]]
    results["rows"][1]["n_alpha"] = [[0.62, 0.5, 0.7], [0.43, 0.1, 0.8], [None] * 3]
    text = printed(results)
    lines = text[text.index("n-alpha: accepted") :].splitlines()
    (head,) = [line for line in lines if "n = " in line]
    assert re.findall(r"n = \d", head) == ["n = 0", "n = 1", "n = 2"]
    first, second = [line for line in lines if line.startswith("draft model")][:2]
    assert re.findall(r"\s(0\.\d\d|-)(?=\s)", first) == ["0.81"]
    assert re.findall(r"\s(0\.\d\d|-)(?=\s)", second) == ["0.62", "0.43", "-"]


def test_without_a_sweep(results: dict[str, Any]) -> None:
    results["sweep"] = []
    assert "K at T" not in printed(results)


@pytest.mark.parametrize(
    ("value", "text"), [([1.724, 1.649, 1.79], "1.72 [1.65, 1.79]"), ([1.5, None, None], "1.50"), ([None] * 3, "-")]
)
def test_interval(value: list[float | None], text: str) -> None:
    assert interval(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1.724, "1.72"), (None, "-"), (float("nan"), "-"), (12345.6, "12,345.60")]
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_verdict_that_is_another_drafters(results: dict[str, Any]) -> None:
    """In place of `lossless`; what is not lossless stays called so."""
    row = {**results["rows"][0], "method": "untrained draft"}
    results["rows"].append(row)
    text = printed(results)
    assert text.count("as draft model") == 2, "beside tau, and beside acceptance by depth"
    assert max(map(cell_len, text.splitlines())) <= 80
    row["verdict"] = "NOT lossless"
    assert "as draft model" not in printed(results)
    row |= {"verdict": "not audited", "audited": None}
    assert printed(results).count("not audited") == 2
