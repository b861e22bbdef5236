"""The same promises on a GPU: greedy equality with the baseline, the audit, training, resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.config import AuditConfig
from draftsmith.launch.cli import main
from helpers.runs.small_run import assert_same_weights, write_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PROMPTS = [[5, 9, 2, 33, 7], [11, 4], [1, 2, 3]]


@pytest.fixture
def pair() -> tuple[Backbone, DraftModel]:
    target = make_target("qwen3")
    drafter = make_drafter(target)
    target.model.to("cuda")
    drafter.backbone.model.to("cuda")
    return target, drafter


def test_greedy_equals_the_baseline(pair: tuple[Backbone, DraftModel]) -> None:
    target, drafter = pair
    own = generate(target, drafter, PROMPTS, warper=Warper(0.0), max_new_tokens=32)
    base = autoregressive(target, PROMPTS, warper=Warper(0.0), max_new_tokens=32)
    assert own.tokens == base.tokens


def test_the_audit_passes(pair: tuple[Backbone, DraftModel]) -> None:
    report = audit(*pair, PROMPTS, AuditConfig(tokens=2000, sequences=200_000, prompts=3))
    assert report.verdict == "lossless", report.failures


@pytest.mark.parametrize("source", ["online", "cache"])
def test_prefetching_changes_no_number(source: str, tmp_path: Path) -> None:
    """The target on a stream beside the drafter's, or read by a thread: the same run."""
    recipe = str(write_recipe(tmp_path))
    for ahead in ("true", "false"):
        words = ["--features.source", source, "--features.prefetch", ahead]
        assert main(["train", recipe, "--out", str(tmp_path / ahead), *words]) == 0
    assert_same_weights(tmp_path / "true", tmp_path / "false")


def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["train", recipe, "--out", str(whole)]) == 0
    assert main(["train", recipe, "--out", str(cut)]) == 0
    for step in (24, 21):  # as if the run had been killed behind step 18
        (cut / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink(missing_ok=True)
    assert main(["train", recipe, "--out", str(cut)]) == 0
    assert_same_weights(whole, cut)
