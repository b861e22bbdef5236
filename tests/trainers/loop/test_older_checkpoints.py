"""A checkpoint of another format is refused with the versions named; what it says and leaves out is compared."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draftsmith
import pytest
import torch
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.model import Recipe
from draftsmith.storage import MANIFEST
from draftsmith.trainers.config import ModelConfig, ObjectiveConfig
from draftsmith.trainers.loop.loop import Loop
from draftsmith.trainers.loop.snapshot import Counters, Snapshots, _broken
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


def snapshots(folder: Path, identity: dict[str, int]) -> Snapshots:
    """Of one process, three rows to a forward pass."""
    one: Any = SimpleNamespace(num_processes=1, is_main_process=True)
    parts: Any = {"wrapped": None, "module": None, "average": None, "rollouts": None}
    return Snapshots(folder, one, optimizers=[], identity=identity, micro_rows=lambda: 3, **parts)


@pytest.mark.parametrize(
    ("changed", "stays"),
    [
        ("probe.prompts", False),
        ("probe.max_new_tokens", False),
        ("probe.draft_length", False),
        ("loop.validate_rows", False),
        ("loop.steps", True),
    ],
)
def test_the_best_holds_where_it_is_measured_as_before(changed: str, stays: bool, tmp_path: Path) -> None:
    before = {"probe.prompts": 4, "probe.max_new_tokens": 8, "probe.draft_length": 2, "loop.validate_rows": 16}
    before["loop.steps"] = 100
    (tmp_path / MANIFEST).write_text(json.dumps({"recipe": before}))
    counters = Counters(50, {"tau": 2.5}, 0, 0)
    now = snapshots(tmp_path, before | {changed: 1})
    assert now.best_of(counters, tmp_path) == ({"tau": 2.5} if stays else None)
    (tmp_path / MANIFEST).write_text("{}")  # an earlier version said nothing
    assert now.best_of(counters, tmp_path) == {"tau": 2.5}


def test_what_a_checkpoint_does_not_say_of_rounding_is_as_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = {"processes": 1, "threads": torch.get_num_threads(), "compile": False, "micro_rows": 3}
    for there, said in (({}, ""), (known, ""), ({"micro_rows": 2}, "micro_rows 2 before and 3 now")):
        (tmp_path / MANIFEST).write_text(json.dumps(there))
        caplog.clear()
        snapshots(tmp_path, {})._compare_rounding(tmp_path)
        assert [each.count(said) for each in caplog.messages] == ([1] if said else [])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "behind step 7 a weight of another process is not finite, though"),
        (["a.weight"], "behind step 7 a.weight is not finite, though"),
        (["a.weight", "b.bias", "c.bias"], "behind step 7 a.weight is not finite, and 2 more, though"),
    ],
)
def test_weights_that_are_not_finite_are_named_and_counted(names: list[str], said: str) -> None:
    assert str(_broken(names, 7)).startswith(said)
