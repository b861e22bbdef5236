"""The command line: words to verbs, one message on failure, the exit codes of `errors.py`."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import draftsmith
import pytest
from draftsmith.errors import DataError, DraftsmithError, EnvironmentFailure, RequestError, Stopped, TrainingFailed
from draftsmith.launch import cli, verbs
from draftsmith.launch.cli import main, split_overrides
from draftsmith.launch.recipe.load import load_recipe, shipped_recipes

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
def test_overrides_are_told_from_flags(words: list[str], rest: list[str], found: list[tuple[str, str]]) -> None:
    assert split_overrides(words) == (rest, found)


def test_ls_names_every_shipped_recipe(capfd: Captured) -> None:
    assert main(["ls"]) == 0
    message = capfd.readouterr().out
    assert len(shipped_recipes()) >= 4
    assert all(path.stem in message for path in shipped_recipes())


def test_doctor_says_what_is_there_and_nothing_private(capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor"]) == 0
    told = capfd.readouterr().out
    found = json.loads(told)
    assert found["draftsmith"] == draftsmith.__version__
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["now"]["embedded_target"] == "loads, 12,045,136 parameters"
    assert 0 < found["now"]["free_memory_gb"] < found["memory_gb"]
    assert found["now"]["free_disk_gb"].keys() == {"here", "cache of the hub"}
    assert len(found["now"]["cards"]) == len(found["devices"])
    assert str(Path.home()) not in told

    def fails(_path: str) -> None:
        raise OSError(f"{Path.home()}/model.safetensors is damaged")

    monkeypatch.setattr("draftsmith.decoding.backbone.loading.load_target", fails)
    assert main(["doctor"]) == 0
    assert json.loads(capfd.readouterr().out)["now"]["embedded_target"] == "fails: OSError"


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


def test_a_copy_makes_its_folder(tmp_path: Path) -> None:
    assert main(["copy", "distill-tiny", str(tmp_path / "new" / "mine.yaml")]) == 0
    assert load_recipe(str(tmp_path / "new" / "mine.yaml")).recipe.method == "distill"


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
    message = capfd.readouterr()
    assert reason in message.err
    assert "Traceback" not in message.err


TAKES_VALUES = {
    "show",
    "check",
    "train",
    "eval",
    "audit",
    "tree",
    "tune",
    "chat",
    "compare",
    "inspect",
    "generate",
    "adapt",
}


@pytest.mark.parametrize("verb", [[], *[[name] for name in verbs.VERBS]])
def test_help(verb: list[str], capfd: Captured) -> None:
    """Every verb explains itself on the standard output."""
    assert main([*verb, "--help"]) == 0
    message = capfd.readouterr()
    about = verbs.VERBS[verb[0]].request.__doc__ if verb else cli._ABOUT
    assert about is not None
    assert " ".join(about.split()[:3]) in message.out
    assert ("--section.field VALUE" in message.out) == (verb[:1] != [] and verb[0] in TAKES_VALUES)
    assert not message.err


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
        (OSError(errno.ENOSPC, "No space left on device", "x/run.yaml"), 4),
        (PermissionError(errno.EACCES, "Permission denied", "x/run.yaml"), 4),
    ],
)
def test_exit_codes(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capfd: Captured) -> None:
    """One message without a traceback; --debug, anywhere among the words, brings it back."""

    def fail(_self: object) -> None:
        raise error

    monkeypatch.setitem(verbs.VERBS, "ls", replace(verbs.VERBS["ls"], run=fail))
    assert main(["ls"]) == code
    message = capfd.readouterr().err
    assert message.startswith("draftsmith: ")
    assert message.count("draftsmith: ") == 1
    assert "Traceback" not in message
    assert ("--debug" in message) == isinstance(error, ZeroDivisionError)
    assert main(["--debug", "ls"]) == code
    assert "Traceback" in capfd.readouterr().err


def test_the_process_exits_with_the_code(tmp_path: Path) -> None:
    """As scripts see it: the module, its streams and its status."""
    done = subprocess.run(
        [sys.executable, "-m", "draftsmith.launch.cli", "train", "./none.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "draftsmith: there is no recipe file ./none.yaml; `draftsmith ls` lists shipped ones"
    ]
    assert list(tmp_path.iterdir()) == []


# what was typed, and why it is refused; FILE is one, RUN a run folder of an EAGLE drafter
REFUSED = [
    ("eval", "no target is named: name a run folder"),
    ("audit", "no target is named: name a run folder"),
    ("tree", "no target is named: name a run folder"),
    ("eval nowhere", "nowhere is no run folder"),
    ("tree nowhere", "nowhere is no run folder"),
    ("export nowhere", "nowhere is no run folder"),
    ("inspect nowhere", "no recipe is called 'nowhere'"),
    ("inspect distill-tiny --rows 0", "--rows is 0; expected 1 or more"),
    ("inspect distill-tiny --rows -3", "--rows is -3; expected 1 or more"),
    ("eval --target tiny", "--method trained needs a drafter"),
    ("eval RUN --eval.repeats 0", "eval.repeats"),
    ("eval --target tiny --method ngram --eval.seed -1", "found -1"),
    ("audit --survey --determinism", "exclude each other"),
    ("audit --survey --audit.seed -1", "found -1"),
    ("audit --target tiny --method skeleton-of-thought", "nothing to audit"),
    ("tree RUN --temperature -1", "--temperature is -1.0; expected 0 or more"),
    ("tree RUN --temperature nan", "--temperature is nan"),
    ("tree RUN --texts 0", "--texts is 0; expected 1 or more"),
    ("tree RUN --out RUN", "is a folder; name a file"),
    ("tree RUN --out FILE/tree.json", "is a file; name another folder"),
    ("export RUN --out FILE/x", "is a file; name another folder"),
    ("report FILE", "is a file; name another folder"),
    ("copy distill-tiny FILE/x.yaml", "is a file; name another folder"),
    ("derive quantised --out FILE/x", "is a file; name another folder"),
    ("datastore build --source stdlib --out FILE/x", "is a file; name another folder"),
    ("datastore build --source nowhere --out x", "there is no 'nowhere'"),
    ("show distill-tiny --loop.seed 99999999999999999999", "should be less than 4294967296"),
    ("show distill-tiny --loop.seed -1", "found -1"),
    ("show distill-tiny --boost.seed -1", "found -1"),
    ("show distill-tiny --optimizer.betas [1.0,2.0]", "found 2.0; input should be less than 1"),
    ("show distill-tiny --optimizer.betas [-0.1,0.9]", "found -0.1"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with what the lines above speak of."""
    (tmp_path / "FILE").touch()
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "run.yaml").write_text(load_recipe("eagle-tiny").yaml())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "reason"), REFUSED)
def test_refusals(line: str, reason: str, here: Path, capfd: Captured) -> None:
    assert main(line.split()) == 2
    message = capfd.readouterr()
    assert reason in message.err
    assert message.err.count("draftsmith: ") == 1
    assert message.out == ""
    assert sorted(path.name for path in here.iterdir()) == ["FILE", "RUN"]


def test_refusals_do_not_wait_for_torch(here: Path) -> None:
    """All in one process of its own."""
    lines = [line for line, _ in REFUSED]
    code = (
        "import sys; from draftsmith.launch.cli import main\n"
        f"for line in {lines}:\n"
        "    assert main(line.split()) == 2, line\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), line"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "copy distill-tiny x.yaml",
        "tree RUN",
        "tree RUN --out x.json",
        "report RUN",
        "export RUN",
        "export RUN --out x",
        "derive quantised --out x",
        "datastore build --source stdlib --out x",
    ],
)
def test_a_folder_that_cannot_be_written_is_told_of_first(
    line: str, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert main(line.split()) == 4
    message = capfd.readouterr().err
    assert message.startswith("draftsmith: cannot write to ")
    assert "Read-only file system" in message


@pytest.mark.parametrize("line", ["show distill-tiny", "ls", "copy distill-tiny x.yaml"])
def test_a_reader_that_is_gone_is_no_fault(line: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `head` is, once it has what it wants; what is short is written at the end alone."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "draftsmith.launch.cli", *line.split()]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_broken_pipe_is_a_fault(monkeypatch: pytest.MonkeyPatch, capfd: Captured) -> None:
    def fail(_self: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setitem(verbs.VERBS, "ls", replace(verbs.VERBS["ls"], run=fail))
    assert main(["ls"]) == 5
    assert "unexpected BrokenPipeError" in capfd.readouterr().err


@pytest.mark.parametrize("module", ["traceback", "tyro", "pydantic"])
def test_an_interrupt_during_the_first_imports_is_quiet(module: str) -> None:
    code = f"""
import runpy, sys
class Interrupt:
    def find_spec(name, path=None, target=None):
        if name == "{module}":
            raise KeyboardInterrupt
sys.modules.pop("{module}", None)
sys.meta_path.insert(0, Interrupt)
runpy.run_module("draftsmith.launch.cli", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["show", "eagle-tiny", "--namo=x"], "--namo: no such flag, and no value of the recipe; did you mean --name?"),
        (["eval", "--targt", "tiny"], "--targt: no such flag, and no value of the recipe; did you mean --target?"),
        (["tune", "--zzzz"], "--zzzz: no such flag, and no value of the recipe; --help lists what there is"),
    ],
)
def test_a_flag_that_nobody_knows(words: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capfd.readouterr().err.startswith(f"draftsmith: {says}")
