"""Rows that the draft writes while it trains: on two processes as in one, and prompts too late."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftsmith.launch.cli import main
from helpers.runs.launcher import launched
from helpers.runs.small_run import RECIPE, drafter

CLOCKS = {"tokens_per_second", "data_wait", "memory_gb", "rollout_share"}
OWN = """\
rollouts: {share: 0.5, prompt_tokens: 8, new_tokens: 8, every_steps: 2}
objective: {kl: 0.0, tv: 1.0, teacher_top_k: 64}
"""


def records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_processes_write_what_one_writes(tmp_path: Path) -> None:
    """Every term of every step, and the drafter; rounding alone may differ."""
    recipe = tmp_path / "own.yaml"
    recipe.write_text(RECIPE.replace("steps: 24", "steps: 6") + OWN)
    words = ["-m", "draftsmith.launch.train", str(recipe), "--out"]
    launched("cpu", *words, str(tmp_path / "one"))
    launched("ddp", *words, str(tmp_path / "two"))
    one, two = records(tmp_path / "one"), records(tmp_path / "two")
    assert len(one) == len(two) > 6
    for mine, theirs in zip(one, two, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - CLOCKS - {"kind"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    weights, others = drafter(tmp_path / "one"), drafter(tmp_path / "two")
    for name, weight in weights.items():
        assert weight.numpy() == pytest.approx(others[name].numpy(), rel=1e-2, abs=1e-4), name


def test_answers_that_begin_too_late_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On-policy rows would lose the beginning of every prompt."""
    rows = [{"prompt": f"{n} " + "why " * 60, "completion": "so " * 9} for n in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    words = ["--data.source", str(path), "--data.packing", "false", "--out", str(tmp_path / "run")]
    assert main(["train", "distill-on-policy-tiny", *words]) == 2
    message = " ".join(capfd.readouterr().err.split())
    assert "has an answer within rollouts.prompt_tokens = 32 tokens" in message
