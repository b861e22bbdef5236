"""Folders from a hostile hand through the real command line: one message, nothing run, nothing written elsewhere."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from draftsmith.launch.cli import main
from helpers.reliability_tally import tally
from helpers.runs.hostile_folders import CASES, Case, copied, make_folders

QUICK = CASES[::8]
EVAL = "--no-audit --eval.limit 1 --eval.prompt_tokens 16 --eval.max_new_tokens 8 --eval.sweep [] --eval.repeats 1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    make_folders(place)
    return place


def words_of(case: Case, folder: Path, made: Path) -> list[str]:
    """The command that reads the folder; the rest is as it should be."""
    if case.base == "results":
        return ["report", str(folder)]
    if case.base == "run":
        return ["eval", str(folder)]
    if case.base == "checkpoint":
        return ["train", "distill-tiny", "--out", str(folder.parent / "out"), "--resume", str(folder)]
    target = folder if case.base in ("target", "template") else made / "target"
    draft = made / "draft_model"
    drafter = {"target": draft, "template": draft, "tree": made / "medusa", "datastore": made / "medusa"}
    words = ["eval", "--target", str(target), "--drafter", str(drafter.get(case.base, folder)), *EVAL.split()]
    words += ["--eval.temperatures", "[0]", "--out", str(folder.parent / "out")]
    if case.base == "template":
        words += ["--prompts", str(made / "prompts.jsonl")]
    if case.base == "across":
        words += ["--drafter.vocabulary", "intersection"]
    if case.base == "tree":
        words += ["--drafter.tree", str(folder / "tree.json")]
    if case.base == "datastore":
        words += ["--method", "rest", "--drafter.rest.datastore", str(folder)]
    return words


def state_of(place: Path) -> dict[str, str]:
    """Every file and link, by what it holds."""
    found = {}
    for path in sorted(place.rglob("*")):
        if path.is_fifo():
            found[str(path)] = "pipe"
        elif path.is_symlink() or not path.is_dir():
            content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
            found[str(path)] = hashlib.sha256(content).hexdigest()
        else:
            found[str(path)] = "folder"
    return found


def outcome(
    case: Case, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit code and message, once nothing has run and nothing but --out was written."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    mark = tmp_path / "executed"
    (tmp_path / "here" / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))  # as `python -m` has it
    folder = copied(case, made, tmp_path, mark)
    before, beside = state_of(tmp_path), state_of(made)
    code = main(words_of(case, folder, made))
    message = capfd.readouterr()
    assert not mark.exists(), "code was executed"
    after = {path: state for path, state in state_of(tmp_path).items() if not path.startswith(str(tmp_path / "out"))}
    assert after == before
    assert state_of(made) == beside
    assert "Traceback" not in message.err
    assert "unexpected" not in message.err
    assert "\x1b" not in message.err + message.out
    return code, message.err


def held(case: Case, code: int, err: str) -> None:
    assert code in ((2, 3, 4) if case.refused else (0, 2, 3, 4)), err
    if code:
        assert err.count("draftsmith: ") == 1
        assert len(err.split("draftsmith: ")[1]) < 1500, "a message is for reading"
    tally("hostile folders", tried=1)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_a_hostile_folder(
    case: Case, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    held(case, *outcome(case, made, tmp_path, monkeypatch, capfd))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK], ids=lambda case: case.name)
def test_every_hostile_folder(
    case: Case, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    held(case, *outcome(case, made, tmp_path, monkeypatch, capfd))


def test_there_are_sixty() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
