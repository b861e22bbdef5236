"""Blockwise parallel decoding from recipe to verdict, the target frozen and tuned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftsmith.launch.cli import main
from helpers.runs.small_flags import MEASURING, TRAINING


def rows_of(run: Path) -> list[dict]:
    return json.loads((run / "eval" / "results.json").read_text())["rows"]


@pytest.mark.slow  # by the lossless rule, frozen, it is among those of test_heads.py
@pytest.mark.parametrize("recipe", ["bpd-tiny", "bpd-tuned-tiny"])
def test_from_recipe_to_verdict(recipe: str, tmp_path: Path) -> None:
    """By the lossless rule, and by the paper's others, each with its measured distance."""
    out = tmp_path / "run"
    assert main(["train", recipe, "--out", str(out), "--loop.steps", "2", *TRAINING]) == 0
    assert (out / "target").is_dir() == (recipe == "bpd-tuned-tiny")
    assert main(["eval", str(out), *MEASURING]) == 0
    assert {(row["method"], row["verdict"]) for row in rows_of(out)} == {("bpd", "lossless")}
    assert main(["report", str(out)]) == 0
    for rule in ("lossy-topk-match", "lossy-close-match", "lossy-min-block"):
        assert main(["eval", str(out), "--eval.rule", rule, *MEASURING]) == 0
        rows = rows_of(out)
        assert {(row["rule"], row["verdict"]) for row in rows} == {(rule, "lossy")}
        assert all(row["distance"] > 0.03 for row in rows)


@pytest.mark.parametrize(
    ("words", "trained"),
    [
        ([], "1.08 M"),  # 5 x 208 inner units and 4 outputs, biases with them
        (["--bpd.block", "3", "--bpd.inner", "64"], "0.12 M"),
        (["--bpd.backbone", "tuned", "--tune.how", "full"], "13.13 M"),  # and the target's 12.05 M
    ],
)
def test_the_pre_flight_counts_what_is_trained(
    words: list[str], trained: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    few = ["--data.limit_rows", "40"]
    assert main(["check", "bpd-tiny", "--out", str(tmp_path), *few, *words]) == 0
    assert f"{trained} parameters" in capfd.readouterr().out
