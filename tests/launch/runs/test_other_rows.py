"""A run goes on with the rows that it began with, and with the values that they hang on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from draftsmith.errors import RequestError
from draftsmith.launch.check.resume import check_resume
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.loop import checkpoint
from helpers.runs.small_run import RECIPE

FEW = ["--loop.steps", "4", "--checkpoint.every_steps", "2", "--probe.every_steps", "4"]
LAST = "checkpoints/step-00000004/manifest.json"
Captured = pytest.CaptureFixture[str]


def line(number: int) -> str:
    text = " ".join(f"row {number} is like no other, and has {number * 7 + at} words" for at in range(3))
    return json.dumps({"text": text}) + "\n"


def write(folder: Path, count: int) -> None:
    (folder / "rows.jsonl").write_text("".join(map(line, range(count))))


def words(folder: Path, out: str) -> list[str]:
    return ["train", str(folder / "small.yaml"), "--out", str(folder / out), *FEW, "--data.validation_share", "0.2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on forty lines, `run`, with its recipe and its rows beside it."""
    folder = tmp_path_factory.mktemp("rows")
    data = f"data: {{source: {folder / 'rows.jsonl'}, limit_rows: 60,"
    (folder / "small.yaml").write_text(RECIPE.replace("data: {limit_rows: 30,", data))
    write(folder, 40)
    assert main(words(folder, "run")) == 0
    return folder


@pytest.mark.run
def test_other_rows_are_refused(place: Path, capfd: Captured) -> None:
    there = json.loads((place / "run" / LAST).read_text())["rows"]
    write(place, 41)
    assert main(words(place, "run")) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert f"step-00000004 was made for something else: rows is {there[:12]}... there and " in said
    assert "give the same rows to go on, or begin in another --out" in said
    assert main(words(place, "fresh")) == 0
    assert json.loads((place / "fresh" / LAST).read_text())["rows"] != there


@pytest.mark.run
def test_the_same_rows_from_elsewhere_go_on(place: Path) -> None:
    """From another cache, and out of a file that has changed where no row comes from."""
    write(place, 40)
    assert main(words(place, "run")) == 0
    assert main([*words(place, "run"), "--data.cache", str(place / "cache")]) == 0
    write(place, 60)
    assert main(words(place, "longer")) == 0
    write(place, 70)
    assert main(words(place, "longer")) == 0


@pytest.mark.slow
@pytest.mark.run
def test_a_checkpoint_that_does_not_tell_its_rows_goes_on(place: Path) -> None:
    """Earlier versions wrote such."""
    shutil.copytree(place / "run", place / "older")
    path = place / "older" / LAST
    told = json.loads(path.read_text())
    del told["rows"]
    path.write_text(json.dumps(told))
    write(place, 41)
    assert main(words(place, "older")) == 0


def recipe_of(columns: dict[str, str]) -> Recipe:
    recipe = Recipe(method="distill")
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"columns": columns})})


def saved(run: Path, identity: dict[str, Any]) -> Path:
    """A run of one checkpoint that says it is of `identity`."""

    def fill(staging: Path) -> None:
        (staging / "trainer.json").write_text("{}")

    checkpoint.write(run / "checkpoints", "step-00000001", fill, manifest={"recipe": identity})
    return run


@pytest.mark.parametrize(
    ("there", "here", "differ"),
    [
        ({}, {}, None),
        ({"prompt": "question"}, {"prompt": "question"}, None),
        ({"prompt": "question"}, {}, "data.columns.prompt is question there and None here"),
        ({}, {"prompt": "question"}, "data.columns.prompt is None there and question here"),
        ({"prompt": "a", "answer": "b"}, {"prompt": "a"}, "data.columns.answer is b there and None here"),
    ],
)
def test_values_are_compared_both_ways(
    there: dict[str, str], here: dict[str, str], differ: str | None, tmp_path: Path
) -> None:
    run = saved(tmp_path, recipe_of(there).identity)
    if differ is None:
        check_resume(run, recipe_of(here), "auto")
        return
    with pytest.raises(RequestError, match=differ):
        check_resume(run, recipe_of(here), "auto")


def test_what_is_free_now_is_not_compared(tmp_path: Path) -> None:
    """Checkpoints of earlier versions name their cache; a value that a later one has added is its default."""
    identity = recipe_of({}).identity
    fewer = {name: value for name, value in identity.items() if name != "loop.seed"}
    check_resume(saved(tmp_path, fewer | {"data.cache": "/elsewhere"}), recipe_of({}), "auto")
