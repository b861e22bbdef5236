"""Runs along own drafts: cut anywhere, in two processes, and what they report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftsmith.errors import Stopped
from faults import own_draft_ranks as drafting
from faults import ranks, toy

DAILY = ("eagle3",)
METHODS = [each if each in DAILY else pytest.param(each, marks=pytest.mark.slow) for each in drafting.CASES]


@pytest.mark.parametrize("method", METHODS)
def test_every_cut_resumes_to_the_same_bits(method: str, tmp_path: Path) -> None:
    """Between two checkpoints too: the steps behind the last one draft the same again."""
    drafting.run(tmp_path / "whole", method)
    wanted = toy.state_files(tmp_path / "whole")
    for cut in (3, 7):
        out = tmp_path / f"cut-{cut}"
        with pytest.raises(Stopped):
            drafting.run(out, method, stop_at=cut)
        drafting.run(out, method)
        assert toy.state_files(out) == wanted, cut


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_draft_what_one_does(method: str, tmp_path: Path) -> None:
    """Losses and what is kept of the drafts, step by step; which rows are drafted for is the step's, not a process's."""
    ranks.run(2, drafting.run, tmp_path / "two", method)
    ranks.run(1, drafting.run, tmp_path / "one", method)
    two, one = toy.losses(tmp_path / "two"), toy.losses(tmp_path / "one")
    assert two == pytest.approx(one, rel=2e-4)
    kept = [own(tmp_path / each) for each in ("two", "one")]
    assert kept[0] == pytest.approx(kept[1], rel=1e-2, abs=1e-3)
    assert len(kept[0]) == toy.STEPS


def own(out: Path) -> list[float]:
    """The accepted length of own drafts in every step."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["own_length"] for line in lines if line["kind"] == "train"]


def test_what_is_reported_adds_up(tmp_path: Path) -> None:
    """By depth and in sum; held-out rows are the text's alone, and are measured as without rollouts."""
    drafting.run(tmp_path, "mtp")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    assert train
    for line in train:
        assert 1 >= line["own_kept_1"] >= line["own_kept_2"] >= 0
        assert line["own_length"] == pytest.approx(line["own_kept_1"] + line["own_kept_2"], abs=1e-5)
        assert line["alpha"] >= 0
        assert line["rollout_share"] >= 0
    validation = [line for line in lines if line["kind"] == "validation"]
    assert validation
    assert not any(name.startswith("validation_own") for line in validation for name in line)
