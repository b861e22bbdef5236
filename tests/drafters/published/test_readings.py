"""What a form leaves open: its readings, each of which is decoded, and what their acceptance says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.published.forms import published
from draftsmith.drafters.published.readings import Reading, _of_flags, _of_states, readings_of
from draftsmith.drafters.published.sizes import resolved
from draftsmith.drafters.registry import load_drafter
from draftsmith.launch.cli import main
from draftsmith.launch.measure import readings
from draftsmith.launch.measure.readings import _rates, _shown, verdict
from draftsmith.trainers.teacher.frozen import settings_of
from helpers.models.published_forms import FORMS


def test_every_reading_can_be_loaded_and_measured(
    deep: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"abc def {n}"}) + "\n" for n in range(2)))
    folder = FORMS["EAGLE-3, the target's head"](deep.model).write(tmp_path / "d")
    words = ["--target", deep.name, "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "6"]
    assert main(["inspect-drafter", str(folder), *words]) == 0
    out = capsys.readouterr().out
    for reading in (
        "as it is read here",
        "hidden states 1, 3, 4",
        "hidden states 3, 5, 6",
        "norm_before_residual true",
    ):
        assert re.search(rf"{reading} +\d\.\d\d \+- ", out), reading
    assert "acceptance " in out


def test_readings_of_each_form(deep: Backbone, tmp_path: Path) -> None:
    """The first changes nothing; no other is the same."""
    config = deep.model.config
    for number, (form, make) in enumerate(FORMS.items()):
        found = published(make(deep.model).write(tmp_path / str(number)))
        assert found is not None
        first, *others = readings_of(found, resolved(found.form.settings(found.files), config), config)
        assert not first.changes
        assert all(each.changes for each in others)
        assert len({each.what for each in others}) == len(others), form
        net: Any = load_drafter(found.files.folder, deep).module
        with torch.device("meta"):
            built = [type(net).from_settings(settings_of(net.config) | each.changes) for each in others]
        assert all(each.config != net.config for each in built), form


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        ({"feature_norms": True}, False),
        ({"feature_norms": False}, True),
        ({"feature_norms": True, "output_norm": False}, True),
        ({"feature_norms": False, "output_norm": True}, False),
    ],
)
def test_what_is_fed_back_has_a_norm_where_features_have(settings: dict[str, bool], other: bool) -> None:
    """The other reading of each flag is the opposite of how it is read here."""
    form = SimpleNamespace(flags={"output_norm": "why", "norm_before_fc": "why"}, before_norm=False)
    found: Any = SimpleNamespace(form=form)
    changes = [{"output_norm": other}, {"norm_before_fc": True}]
    assert [each.changes for each in _of_flags(found, settings)] == changes


def test_what_is_compared_is_the_accepted_drafts_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each prompt by itself, at temperature 0: 9 tokens of 3 calls, 6 of them drafted, are 2 a call."""
    asked: list[tuple[Any, ...]] = []
    written = [
        (["prefill", *["draft"] * 4, "correction", *["draft"] * 2, "bonus"], 3),
        (["prefill"], 0),
        (["prefill", "correction", "draft", "correction"], 2),
    ]

    def decoded(target: Any, drafter: Any, prompts: Any, **how: Any) -> SimpleNamespace:
        origin, calls = written[len(asked)]
        asked.append((target.name, drafter, prompts, how["warper"].temperature, how["max_new_tokens"], how["eos_ids"]))
        return SimpleNamespace(origin=[origin], target_calls=calls)

    monkeypatch.setattr(readings, "load_drafter", lambda folder, _target: str(folder))
    monkeypatch.setattr(readings, "generate", decoded)
    target: Any = SimpleNamespace(name="t", eos_ids={7, 3})
    prompts = [[1, 2], [3], [4, 5]]
    assert _rates(Path("d"), target, prompts, 9).tolist() == [2.0, 0.0, 0.5]
    assert asked == [("t", "d", [each], 0.0, 9, [3, 7]) for each in prompts]


def test_a_rate_is_shown_with_the_error_of_its_mean() -> None:
    """Of 2 and 0 the deviation is 1.41, over the root of two prompts 1."""
    assert _shown(np.array([2.0, 0.0])) == "1.00 +- 1.00"
    assert _shown(np.array([1.0, 1.0, 4.0, 2.0])) == "2.00 +- 0.71"
    assert _shown(np.array([1.5])) == "1.50 +- nan"


OPEN = [
    Reading("as it is read here", ""),
    Reading("another", "by somebody", {"layers": [1, 2]}),
    Reading("a third", ""),
]


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ([[0.0, 0.05], [0.0, 0.0], [0.0, 0.0]], "supports no reading"),
        ([[2.0, 1.8], [0.3, 0.2], [0.1, 0.2]], "supports the drafter as it is read here"),
        ([[0.3, 0.2], [2.0, 1.8], [0.1, 0.2]], r"supports another reading: another \(by somebody\).* layers \[1, 2\]"),
        ([[2.0, 0.4], [0.9, 1.0], [0.1, 0.2]], "does not tell as it is read here from another"),
    ],
)
def test_verdicts(rates: list[list[float]], says: str) -> None:
    assert re.search(says, verdict(OPEN, [np.array(each) for each in rates]))


def test_a_reading_ahead_by_less_than_two_standard_errors_tells_nothing() -> None:
    """16 prompts, one reading 2.0 everywhere, the other 2.3 plus and minus 1: 0.3 ahead, the error 0.258."""
    steady = np.full(16, 2.0)
    shaken = 2.3 + np.array([1.0, -1.0] * 8)
    worst = np.full(16, 0.1)
    assert "does not tell" in verdict(OPEN, [steady, shaken, worst])
    assert "supports another reading" in verdict(OPEN, [steady, shaken + 0.6, worst])


def test_states_beyond_the_last_are_no_reading() -> None:
    assert [each.changes["layers"] for each in _of_states({"layers": [1, 2, 3]}, 4)] == [[0, 1, 2]]
    assert [each.changes["layers"] for each in _of_states({"layers": [1, 2]}, 4)] == [[0, 1], [2, 3]]
