"""Held-out rows in which nothing is compared: no number says how good the draft is."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from chains import Batch, Chains
from draftsmith.trainers.loop.sums import COMPARED, COUNT, means
from faults import toy


class OfTwoWords(Chains):
    """The second token of each row is its only label, and no drafter that reads a pair of tokens speaks of it."""

    def batch(self, rows: list[int] | None = None) -> Batch:
        batch = super().batch(rows)
        batch["loss_mask"] = batch["positions"] == 1
        return batch


def test_a_term_that_nothing_was_compared_for_has_no_mean() -> None:
    sums = {"loss": 0.0, "alpha": 3.0, "alpha_2": 0.0, COUNT + "alpha": 6.0, COUNT + "alpha_2": 0.0}
    assert means(sums, 6) == {"loss": 0.0, "alpha": 0.5}
    assert means(sums | {COMPARED + "loss": 0.0}, 6) == {"alpha": 0.5}
    assert means(sums | {COMPARED + "loss": 2.0}, 6) == {"loss": 0.0, "alpha": 0.5}
    assert means({"loss": 0.0}, 0) == {}


def test_no_held_out_loss_is_never_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = toy.loop_in(tmp_path, "eagle")
    loop.by_validation = True
    loop.validation_rows = OfTwoWords(8, 2)
    caplog.set_level(logging.WARNING)
    toy.run(loop)
    held_out = [each for each in _records(tmp_path) if each["kind"] == "validation"]
    assert [set(each) for each in held_out] == [{"kind", "step"}] * 2
    assert loop.best is None
    assert caplog.text.count("there is no held-out loss") == 1


def _records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
