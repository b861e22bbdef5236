"""Held-out rows in which nothing is compared: no number says how good the draft is."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from draftsmith.trainers.loop.sums import COMPARED, COUNT, means
from faults import toy
from helpers.models.learnable_text import Batch, Chains


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


def test_a_line_without_a_loss_says_that_there_were_no_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """EAGLE-3 whose draft vocabulary has no token that the target is likeliest to write."""
    caplog.set_level(logging.INFO)
    loop = toy.loop_in(tmp_path, "eagle3", given={"eagle3": {"passes": 2, "vocabulary": 5}})
    ids_U = loop.objective.draft().ids_U.tolist()
    objective: Any = loop.objective
    prepare = objective.prepare

    def unlikely(batch: Batch) -> Any:
        made = prepare(batch)
        head = objective._target.get_output_embeddings()
        worst = head.weight[ids_U].mean(0)  # a state from which none of these is the likeliest
        return made._replace(hidden_RSH=made.hidden_RSH * 0 - 100 * worst)

    objective.prepare = unlikely
    toy.run(loop)
    lines = [each for each in _records(tmp_path) if each["kind"] == "train"]
    assert len(lines) == toy.STEPS
    assert all(line["labels"] == 0 and "loss" not in line for line in lines)
    assert all(0 <= line["covered_mass"] < 0.5 and 0 <= line["covered_labels"] < 1 for line in lines)
    assert caplog.text.count("no token since the last line was compared (labels=0)") == 1
    assert "labels=0 " in caplog.text


def test_a_line_with_a_loss_says_nothing_of_labels(tmp_path: Path) -> None:
    toy.run(toy.loop_in(tmp_path, "eagle3", given={"eagle3": {"passes": 2}}))
    lines = [each for each in _records(tmp_path) if each["kind"] == "train"]
    assert all("labels" not in line and "loss" in line for line in lines)
    for line in lines:
        assert [line["covered_mass"], line["covered_labels"]] == pytest.approx([1, 1], abs=1e-5)
