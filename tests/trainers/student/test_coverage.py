"""How much a draft vocabulary covers is stated: by the pre-flight, when training begins, in the report."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draftsmith.eval.report.report import covered
from draftsmith.launch.check.check import _data
from draftsmith.launch.check.models import Models
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers.student.fused import covered_by_half, say_covered


@pytest.mark.parametrize(
    ("size", "share"),
    [
        (1, "25.0%"),  # 1 is the most frequent of the first and third text; one of the four other labels is 1
        (2, "50.0%"),
        (3, "50.0%"),  # 5, which the others do not have
        (50, "50.0%"),  # as many as were seen
    ],
)
def test_by_half_of_the_texts_for_the_other_half(size: int, share: str) -> None:
    labels = [[1, 1, 2], [1, 2], [2, 1, 5], [3, 4]]
    said = covered_by_half(labels, size, "eagle3.vocabulary")
    assert said == (
        f"; a draft vocabulary of {size} tokens (eagle3.vocabulary) chosen from every second of these rows has {share} "
        "of the labels of the others"
    )


def test_of_too_few_texts_nothing_is_said() -> None:
    assert covered_by_half([], 4, "x") == covered_by_half([[1, 2]], 4, "x") == ""


def test_of_all_training_labels(caplog: pytest.LogCaptureFixture) -> None:
    ids = np.array([[1, 2, 3, 4], [1, 1, 9, 9]])
    rows: Any = SimpleNamespace(ids_RS=ids, in_loss_RS=np.array([[False, True, True, True], [True] * 4]))
    with caplog.at_level(logging.INFO):
        say_covered(rows, [1, 2, 4])
    assert "the draft vocabulary of 3 tokens has 57.1 % of the 7 training labels" in caplog.text


@pytest.mark.parametrize(("method", "told"), [("eagle3", True), ("peagle", True), ("eagle", False)])
def test_the_pre_flight_says_it(method: str, told: bool, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"line {n % 2} of many\n" * 3}) + "\n" for n in range(20)))
    flags = [("data.source", str(rows))] + [(f"{method}.vocabulary", "3")] * told
    recipe = load_recipe(f"{method}-tiny", flags).recipe
    said = str(_data(recipe, Models(recipe)))
    assert (f"; a draft vocabulary of 3 tokens ({method}.vocabulary) chosen from" in said) is told


def test_the_report_says_it_of_held_out_rows() -> None:
    line = {"kind": "validation", "validation_covered_labels": 0.934, "validation_covered_mass": 0.956, "step": 20}
    curve = [line | {"step": 10, "validation_covered_mass": 0.1}, line, {"kind": "train", "step": 21}]
    assert covered(curve) == [
        "The draft vocabulary has 93% of the held-out labels and 96% of the target's mass there (step 20): what it "
        "lacks is never drafted."
    ]
    assert covered([{"kind": "validation", "step": 3, "validation_loss": 1.0}]) == []
