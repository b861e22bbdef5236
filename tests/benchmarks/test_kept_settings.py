"""A folder of kept results takes one set of settings, and says what differs from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from draftsmith.benchmarks.common.kept import same_settings
from helpers.benchmark_scripts import load

GIVEN = {
    "out": Path("runs/x"),
    "steps": 4,
    "base": Path("runs/base"),
    "rows": ["a"],
    "set": [("loop.seed", "1"), ("loop.seed", "2"), ("data.limit_rows", "40")],
    "domain": {"maths": Path("maths.jsonl"), "tests": ("test",)},
}


def test_the_first_call_writes_and_an_equal_one_passes(tmp_path: Path) -> None:
    same_settings(tmp_path / "new", GIVEN, free=["rows"])
    place = tmp_path / "new" / "settings.json"
    written = place.read_text()
    assert json.loads(written) == {
        "--steps": 4,
        "--base": "runs/base",
        "--set loop.seed": "2",
        "--set data.limit_rows": "40",
        "--domain maths": "maths.jsonl",
        "--domain tests": ["test"],
    }
    # another place for the folder, other rows, the same values in another order
    again = {"out": tmp_path, "rows": ["b", "c"], "set": [*reversed(GIVEN["set"][1:])]}
    same_settings(tmp_path / "new", GIVEN | again, free=["rows"])
    assert place.read_text() == written


def test_results_from_before_there_were_settings_are_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_text("{}")
    same_settings(tmp_path, GIVEN)
    with pytest.raises(SystemExit, match="--steps: 4 there, 5 asked for"):
        same_settings(tmp_path, GIVEN | {"steps": 5})


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"steps": 5}, "--steps: 4 there, 5 asked for"),
        ({"base": None}, '--base: "runs/base" there, null asked for'),
        ({"set": []}, '--set data.limit_rows: "40" there, not set asked for; --set loop.seed: "2"'),
        ({"set": [*GIVEN["set"], ("a.b", "1")]}, '--set a.b: not set there, "1" asked for'),
        ({"domain": {"maths": Path("else"), "tests": ("test",)}}, '--domain maths: "maths.jsonl"'),
    ],
)
def test_others_are_refused_by_name(tmp_path: Path, other: dict[str, Any], says: str) -> None:
    same_settings(tmp_path, GIVEN)
    written = (tmp_path / "settings.json").read_text()
    with pytest.raises(SystemExit) as refused:
        same_settings(tmp_path, GIVEN | other)
    message = str(refused.value)
    assert message.startswith(f"{tmp_path} holds results of other settings")
    assert says in message
    assert message.endswith("Name another --out, or remove this one")
    assert (tmp_path / "settings.json").read_text() == written


class Passed(Exception):
    """The settings were taken; what follows would be work."""


@pytest.mark.parametrize(
    ("script", "selected"),
    [
        ("alignment", ["--losses", "kl", "--sources", "gold"]),
        ("draft_weights", ["--families", "MTP", "--arms", "shipped", "--seeds", "0"]),
        ("ensembles", ["--settings", "span 4", "--sizes", "", "--members", "2", "--train-only"]),
        ("moving_target", ["--seeds", "0,1"]),
        ("warm_starts", ["--families", "EAGLE-1", "--arms", "before", "--seeds", "0"]),
        ("families", ["--families", "EAGLE-1", "--train-only"]),
        ("origins", ["--rows", "8 bits", "--steps", "3"]),
    ],
)
def test_scripts_hold_to_their_settings(
    script: str, selected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(script)

    def call(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", "--out", str(tmp_path), *words])
        module.main()

    def held(*given: Any, **named: Any) -> None:
        same_settings(*given, **named)
        raise Passed

    monkeypatch.setattr(module, "same_settings", held)
    with pytest.raises(Passed):
        call()
    with pytest.raises(Passed):
        call(*selected)
    for name, value in {"--limit": "3", "--set": "loop.seed=1"}.items():
        with pytest.raises(SystemExit, match=rf"settings.json\): {name}"):
            call(*selected, name, value)


def test_more_ssms_than_were_kept_are_refused(tmp_path: Path) -> None:
    """An arm's first ones may be asked for, and those that nobody trained or measured not."""
    module = load("ensembles")
    args = module.argparse.Namespace(out=tmp_path)
    run = tmp_path / "runs" / "copies"
    (run / "ssm-2").mkdir(parents=True)
    (run / "status.json").write_text('{"state": "finished"}')
    with pytest.raises(SystemExit, match=f"{run} has fewer SSMs than the 3 of --members"):
        module.boost(args, "copies", {}, 3)
    rows = [{"members": n} for n in (1, 1, 2, 2)]
    (tmp_path / "measured-copies.json").write_text(json.dumps({"rows": rows}))
    for counts in ((1,), (1, 2)):
        module.measure(module.Run("copies", run, counts, "base"), None, args)
    with pytest.raises(SystemExit, match=r"copies.json has fewer SSMs than the 3"):
        module.measure(module.Run("copies", run, (1, 2, 3), "base"), None, args)
