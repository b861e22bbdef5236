"""What a report says first: what pays, where it stops paying, never without a verdict."""

from __future__ import annotations

from typing import Any

import pytest
from draftsmith.eval.report.report import _fence, fastest, opening

TIMED = {"method": "draft model", "audited": "draft model", "verdict": "lossless", "tau": [2.0, 1.9, 2.1]}


def row(speed: float, *, low: float | None = None, high: float | None = None, **own: Any) -> dict[str, Any]:
    speedup = [speed, speed - 0.1 if low is None else low, speed + 0.1 if high is None else high]
    made = {**TIMED, "temperature": 0.0, "speedup": speedup, **own}
    return {**made, "audited": own.get("audited", made["method"])}


def test_what_pays_comes_first_with_its_verdict() -> None:
    rows = [row(0.8), row(1.5, method="EAGLE-1"), row(1.05, method="Medusa-1"), row(0.5, temperature=1.0)]
    cold, warm = opening(rows, [])
    assert cold == (
        "T = 0: pays: EAGLE-1 1.50 [1.40, 1.60] times plain decoding with 2.00 [1.90, 2.10] tokens per target call "
        "(lossless); not told apart from plain decoding: Medusa-1 1.05 [0.95, 1.15] times plain decoding with 2.00 "
        "[1.90, 2.10] tokens per target call (lossless); slower: draft model 0.80 [0.70, 0.90] times plain decoding "
        "with 2.00 [1.90, 2.10] tokens per target call (lossless)."
    )
    assert warm.startswith("T = 1: nothing pays beyond its interval. slower: draft model 0.50")


def test_a_control_is_no_contender() -> None:
    rows = [row(0.8), row(3.0, method="untrained draft", audited="draft model")]
    assert "untrained" not in opening(rows, [])[0]


def test_what_was_not_timed_says_so() -> None:
    assert "too little was timed" in opening([row(1.0, speedup=[None, None, None])], [])[0]


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([1.1, 1.3, 0.9], "fastest with 2 (1.30 [1.20, 1.40] times), pays up to 2, and no longer at 4 (lossless)."),
        ([1.3, 0.9, 0.8], "fastest with 1 (1.30 [1.20, 1.40] times), pays up to 1, and no longer at 2 (lossless)."),
        ([1.1, 1.3, 1.2], "fastest with 2 (1.30 [1.20, 1.40] times), still pays at 4, the longest tried (lossless)."),
        ([0.9, 0.8, 0.7], "is slower than plain decoding with every draft length tried, 1, 2, 4 (lossless)."),
    ],
)
def test_where_it_stops_paying(speeds: list[float], expected: str) -> None:
    sweep = [row(speed, draft_length=length) for speed, length in zip(speeds, (1, 2, 4), strict=True)]
    assert opening([row(1.2)], sweep)[-1].endswith(expected)


def test_the_figures_are_the_fastest_rows() -> None:
    rows = [row(0.8), row(1.5, method="EAGLE-1"), row(1.0, speedup=[None, None, None])]
    assert fastest(rows)["method"] == "EAGLE-1"


@pytest.mark.parametrize(("prompt", "longest"), [("none", 3), ("a ``b``", 3), ("a ```b```", 4), ("`````", 6)])
def test_no_text_closes_the_fence_that_it_stands_in(prompt: str, longest: int) -> None:
    """Runs of the prompt and of the answer's pieces, where several make up one."""
    assert _fence([{"prompt": prompt, "tokens": [["x", "draft"]]}]) == "`" * longest
    pieces = [[each, "draft"] for each in prompt]
    assert _fence([{"prompt": "", "tokens": []}, {"prompt": "x", "tokens": pieces}]) == "`" * longest
