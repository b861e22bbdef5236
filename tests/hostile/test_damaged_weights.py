"""Weights that are cut short, empty or no file, through the real command line: one message that says what to do."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import make_drafter
from draftsmith.drafters.folder import save_draft_model, save_heads
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from helpers.models.small_drafters import make_on_target
from helpers.runs.damaged_files import KINDS, damage
from helpers.runs.hostile_folders import make_target_folder

WEIGHTS = "model.safetensors"
HOW = [*KINDS, "a folder"]
DATA = "--data.source {place}/text.txt --data.sequence_length 32 --data.cache {place}/cache"
# of each damaged folder commands that read its weights; {folder} is the damaged one
COMMANDS = {
    "target": [
        "train distill-tiny --target.path {folder} " + DATA,
        "check distill-tiny --target.path {folder} " + DATA,
        "eval --target {folder} --drafter {place}/draft",
        "audit --target {folder} --drafter {place}/draft",
        "generate --source {place}/text.txt --target {folder}",
    ],
    "draft": [
        "eval --target {place}/target --drafter {folder}",
        "audit --target {place}/target --drafter {folder}",
        "generate --source {place}/text.txt --target {place}/target --drafter {folder}",
    ],
    "run/drafter": [
        "eval --target {place}/target --drafter {folder}",
        "audit --target {place}/target --drafter {folder}",
        "export {run}",
        "generate --source {place}/text.txt --target {place}/target --drafter {folder}",
    ],
}
CASES = [(folder, words) for folder, each in COMMANDS.items() for words in each]
FAST = [(*case, how) for case, how in zip(CASES, itertools.cycle(HOW))]
ALL = [(*case, how) for case in CASES for how in HOW]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft model and a run with heads, all of them whole."""
    place = tmp_path_factory.mktemp("made")
    (place / "text.txt").write_text("".join(f"abc def ghi jkl mno pqr {number}\n" for number in range(400)))
    target = make_target_folder(place / "target")
    save_draft_model(make_drafter(target).module, place / "draft", target)
    heads = make_on_target("medusa", target).module
    (place / "run").mkdir()
    (place / "run" / "run.yaml").write_text(
        load_recipe("medusa-tiny", [("target.path", str(place / "target"))]).yaml()
    )
    save_heads(heads, place / "run" / "drafter", target, family="medusa", settings=asdict(heads.config))
    return place


@pytest.mark.parametrize(
    ("folder", "words", "how"), [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in ALL]
)
def test_weights_that_cannot_be_read(
    folder: str, words: str, how: str, made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    top = folder.partition("/")[0]
    shutil.copytree(made / top, tmp_path / "damaged" / top)
    damaged = tmp_path / "damaged" / folder
    path = damaged / WEIGHTS
    if how == "a folder":
        path.unlink()
        path.mkdir()
    else:
        damage(path, how)
    given = words.format(folder=damaged, run=damaged.parent, place=made).split()
    takes_out = given[0] not in ("check", "export")
    code = main([*given, *(["--out", str(tmp_path / "out")] if takes_out else [])])
    message = capfd.readouterr().err
    assert code == 2, message
    assert message.count("draftsmith: ") == 1
    told = " ".join(message.partition("draftsmith: ")[2].split())
    assert "Traceback" not in message
    assert "unexpected" not in message
    size = "no file" if how == "a folder" else f"{path.stat().st_size:,} bytes"
    assert f"{path} ({size}) cannot be read: " in told
    assert "Expected a whole safetensors file: " in told
    assert " again" in told
