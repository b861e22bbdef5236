"""What the report says in words and figures, by hand-made points, rows and runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draftsmith.data.prompts import Prompt
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.report.answers import answers_of
from draftsmith.eval.report.pays import _shown, in_words
from draftsmith.eval.report.report import verdict
from draftsmith.eval.report.server import WAITS, waiting_rows
from draftsmith.eval.report.tables import experts_line


def test_the_best_point_of_a_surface_is_its_highest() -> None:
    surface = {"label": "eagle3", "axis": "batch", "points": [[1, 1.2], [2, 1.5], [4, 0.9]], "crosses_1_at": [3.6]}
    shown = _shown(surface)
    assert shown["best"] == [2, 1.5]
    assert "3.6" in shown["pays"]


def test_bytes_of_a_call_are_not_the_experts_that_it_reads() -> None:
    line = experts_line({"read": {"1": 2.0, "5": 6.0}, "call_bytes": {"1": 100, "5": 150}, "of": 8})
    assert "1.50 times the bytes" in line


@pytest.mark.parametrize(
    ("first", "last", "crossings", "said"),
    [
        (1.0, 1.5, [], "pays at every batch 1 to 4"),
        (0.99, 0.9, [], "pays at no batch 1 to 4"),
        (1.0, 0.5, [1.0], "pays up to batch 1"),
        (0.5, 1.0, [4.0], "pays from batch 4"),
        (1.5, 1.5, [1.5, 3.0], "passes 1 at batch 1.5 and 3"),
    ],
)
def test_what_is_as_fast_as_plain_decoding_pays(first: float, last: float, crossings: list[float], said: str) -> None:
    assert in_words("batch", [(1.0, first), (4.0, last)], crossings) == said


@pytest.mark.parametrize("known", range(1, 5))
def test_the_worst_verdict_of_all_rows(known: int) -> None:
    """What was not audited is worse than a rule that says that it is lossy."""
    best_first = ["lossless", "lossy", "not audited", "NOT lossless"]
    assert verdict([{"verdict": each} for each in best_first[:known]]) == best_first[known - 1]


def test_waits_are_shown_in_milliseconds() -> None:
    """Of the server, and of the one without speculation where there is one; what is not known is a dash."""

    def waits(seconds: float) -> dict[str, Any]:
        each = {"p50": [seconds, None, None], "p90": [2 * seconds, 0.0, 1.0], "p99": [None, None, None]}
        return dict.fromkeys(WAITS, each)

    row = {"method": "m", "temperature": 0.5, "server": {"own": waits(0.0123), "baseline": waits(0.5)}}
    alone = {"method": "n", "temperature": 0.0, "server": {"own": waits(0.0), "baseline": None}}
    assert waiting_rows([row, alone]) == [
        ("m", "0.5", "own", *["12.3 24.6 -"] * 4),
        ("m", "0.5", "without", *["500.0 1,000.0 -"] * 4),
        ("n", "0", "own", *["0.0 0.0 -"] * 4),
    ]
    assert waiting_rows([row], ("p99", "p50"))[0][3] == "- 12.3"


@pytest.mark.parametrize(("batch", "seconds"), [(1, (0.6, 1.1)), (2, (None, None))])
def test_seconds_of_an_answer_are_the_mean_of_its_repeats(batch: int, seconds: tuple[float | None, ...]) -> None:
    """Its prompt included; of answers that were decoded together none is known."""
    prompt = Prompt("7", "all", ("",), chat=False)
    steps = SimpleNamespace(kept_TB=np.array([[2], [0], [1]]))
    generation = SimpleNamespace(tokens=[[5, 6, 7, 8]], steps=steps)
    run: Any = SimpleNamespace(generations=[generation], baseline_texts=[[5, 6, 7]])
    run.seconds_G, run.prefills_G = [1.8], [0.4]
    run.baseline_seconds_G, run.baseline_prefills_G = [1.0], [0.2]
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: str(ids))
    arm: Any = SimpleNamespace(name="m")
    config = EvalConfig(repeats=2, batch=batch)
    plain, own = answers_of(tokenizer, [Request(prompt, [1], 0)], [(arm, run)], config, 0.0)
    assert (plain["method"], plain["tokens"], plain["steps"]) == (None, 3, [1, 1])
    assert (own["method"], own["tokens"], own["steps"]) == ("m", 4, [2, 1])
    assert (plain["seconds"], own["seconds"]) == pytest.approx(seconds)
