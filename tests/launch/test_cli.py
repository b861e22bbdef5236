"""The command line: words to verbs, one message on failure, the exit codes of `errors.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from draftsmith.errors import (
    DataError,
    DraftsmithError,
    EnvironmentFailure,
    RequestError,
    Stopped,
    TrainingFailed,
)
from draftsmith.launch import cli
from draftsmith.launch.cli import main, split_overrides
from draftsmith.launch.recipe import load_recipe, shipped_recipes

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "rest", "found"),
    [
        (["a", "--loop.steps", "5"], ["a"], [("loop.steps", "5")]),
        (["a", "--loop.steps=5"], ["a"], [("loop.steps", "5")]),
        (["--loop.seed", "-1", "a"], ["a"], [("loop.seed", "-1")]),
        (["--data.source=--odd--"], [], [("data.source", "--odd--")]),
        (["--data.source="], [], [("data.source", "")]),
        (["--loop.micro-rows", "2"], [], [("loop.micro_rows", "2")]),
        (["--out", "runs/v1.5"], ["--out", "runs/v1.5"], []),
        (["--out=runs/v1.5"], ["--out=runs/v1.5"], []),
        (["./my.yaml", "--resume", "never"], ["./my.yaml", "--resume", "never"], []),
    ],
)
def test_overrides_are_told_from_flags(
    words: list[str], rest: list[str], found: list[tuple[str, str]]
) -> None:
    assert split_overrides(words) == (rest, found)


def test_ls_names_every_shipped_recipe(capfd: Captured) -> None:
    assert main(["ls"]) == 0
    said = capfd.readouterr().out
    assert len(shipped_recipes()) >= 4
    assert all(path.stem in said for path in shipped_recipes())


def test_show_tells_value_and_origin(capfd: Captured) -> None:
    assert main(["show", "distill-chat", "--loop.seed=7"]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capfd.readouterr().out.splitlines()}
    assert list(lines) == list(load_recipe("distill-chat").origin)
    assert lines["loop.seed"] == ["7", "--loop.seed"]
    assert lines["loop.log_every"][-1] == "default"
    assert lines["target.path"][-1].startswith("distill-chat.yaml:")
    assert lines["optimizer.name"][-1].startswith("distill-tiny.yaml:")


def test_copy_makes_the_same_recipe_and_never_overwrites(tmp_path: Path, capfd: Captured) -> None:
    mine = tmp_path / "mine.yaml"
    assert main(["copy", "distill-tiny", str(mine)]) == 0
    assert load_recipe(str(mine)).recipe == load_recipe("distill-tiny").recipe
    mine.write_text("my work")
    assert main(["copy", "distill-tiny", str(mine)]) == 2
    assert "exists" in capfd.readouterr().err
    assert mine.read_text() == "my work"


@pytest.mark.parametrize("path", shipped_recipes(), ids=lambda path: path.stem)
def test_a_copied_recipe_resolves(path: Path, tmp_path: Path) -> None:
    """One with a base finds it by name where the base is no longer beside it."""
    mine = tmp_path / "mine.yaml"
    assert main(["copy", path.stem, str(mine)]) == 0
    assert load_recipe(str(mine)).recipe == load_recipe(path.stem).recipe


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["trian", "distill-tiny"], "trian"),
        (["train"], "Missing from draftsmith train"),
        (["train", "distill-tiny", "--outt", "x"], "--outt"),
        (["train", "distill-tiny", "--loop", "5"], "--loop"),
        (["audit", "x", "--decoder", "other"], "other"),
        (["ls", "more"], "more"),
    ],
)
def test_words_that_are_not_understood(words: list[str], reason: str, capfd: Captured) -> None:
    assert main(words) == 2
    said = capfd.readouterr()
    assert reason in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("verb", [[], *[[name] for name in cli._VERBS]])
def test_help(verb: list[str], capfd: Captured) -> None:
    """Every verb explains itself on the standard output."""
    assert main([*verb, "--help"]) == 0
    said = capfd.readouterr()
    about = cli._VERBS[verb[0]].__doc__ if verb else cli._ABOUT
    assert about is not None
    assert " ".join(about.split()[:3]) in said.out
    assert not said.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("why"), 2),
        (DataError("why"), 3),
        (EnvironmentFailure("why"), 4),
        (TrainingFailed("why"), 5),
        (DraftsmithError("why"), 5),
        (Stopped("why"), 75),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("why"), 5),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    """One message without a traceback; --debug, anywhere among the words, brings it back."""

    def fail(_self: object) -> None:
        raise error

    monkeypatch.setattr(cli.Ls, "run", fail)
    assert main(["ls"]) == code
    said = capfd.readouterr().err
    assert said.startswith("draftsmith: ")
    assert said.count("draftsmith: ") == 1
    assert "Traceback" not in said
    assert ("--debug" in said) == isinstance(error, ZeroDivisionError)
    assert main(["--debug", "ls"]) == code
    assert "Traceback" in capfd.readouterr().err


def test_the_process_exits_with_the_code(tmp_path: Path) -> None:
    """As scripts see it: the module, its streams and its status."""
    done = subprocess.run(
        [sys.executable, "-m", "draftsmith.launch.cli", "train", "./none.yaml"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "draftsmith: there is no recipe file ./none.yaml; `draftsmith ls` lists shipped ones"
    ]
    assert list(tmp_path.iterdir()) == []
