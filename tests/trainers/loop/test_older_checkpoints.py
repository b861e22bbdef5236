"""A checkpoint of another format is refused with the versions named."""

from __future__ import annotations

import json
from pathlib import Path

import draftsmith
import pytest
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.model import Recipe
from draftsmith.storage import MANIFEST
from draftsmith.trainers.config import ModelConfig, ObjectiveConfig
from draftsmith.trainers.loop.loop import Loop
from draftsmith.trainers.student.architecture import fresh_model
from draftsmith.trainers.target import TargetObjective
from faults import toy
from helpers.models.method_objectives import NoTokenizer
from helpers.reliability_tally import tally

SIZES = ModelConfig(layers=1, hidden=8, heads=1, kv_heads=1, head_size=8, intermediate=8, max_positions=64)


def tiny_loop(out: Path, monkeypatch: pytest.MonkeyPatch, **values: int) -> Loop:
    def objective(_method: str, _device: object) -> TargetObjective:
        recipe = Recipe(method="target", objective=ObjectiveConfig(chunk=16))
        return TargetObjective(recipe, fresh_model(SIZES, vocabulary=toy.VOCABULARY, eos=0), NoTokenizer())

    monkeypatch.setattr(toy, "objective_of", objective)
    return toy.loop_in(out, **values)


def test_another_format_is_refused_with_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passed over, it would be trained anew from the start, and then deleted as an older one."""
    toy.run(tiny_loop(tmp_path, monkeypatch))
    newest = tmp_path / "checkpoints" / "step-00000012" / MANIFEST
    manifest = json.loads(newest.read_text())
    assert manifest["draftsmith"] == draftsmith.__version__
    newest.write_text(json.dumps(manifest | {"format": 7, "draftsmith": "9.1"}))
    with pytest.raises(RequestError, match=rf"its manifest format is 7, .*draftsmith 9.1 .*{draftsmith.__version__}"):
        toy.run(tiny_loop(tmp_path, monkeypatch))
    tally("older versions", tried=1)
