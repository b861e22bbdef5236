"""What `train` leaves in a run's folder: nothing where it is refused, the truth where it fails."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import draftsmith
import pytest
import torch
from draftsmith.errors import DataError, RequestError, Stopped, TrainingFailed
from draftsmith.launch.check.resume import check_resume
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.recipe.model import Recipe
from draftsmith.launch.train import run as run_file
from draftsmith.launch.train import run as train
from draftsmith.launch.train.run import Status
from draftsmith.storage import hold
from draftsmith.storage.staging import this_host
from draftsmith.trainers.methods import METHODS, own_sections
from helpers.runs.crashed_process import run as copy_does
from helpers.runs.small_run import RECIPE

FEW = ["--loop.steps", "4", "--checkpoint.every_steps", "2", "--probe.every_steps", "2"]
LAST = "checkpoints/step-00000004"
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps, with its recipe beside it."""
    folder = tmp_path_factory.mktemp("run-folder")
    (folder / "small.yaml").write_text(RECIPE)
    assert main(words(folder / "run")) == 0
    return folder / "run"


def words(out: Path, *more: str) -> list[str]:
    recipe = next(each / "small.yaml" for each in out.parents if (each / "small.yaml").is_file())
    return ["train", str(recipe), "--out", str(out), *FEW, *more]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def status(folder: Path) -> tuple[str, int]:
    found = json.loads((folder / "status.json").read_text())
    return found["state"], found["exit_code"]


@pytest.mark.run
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--resume", "never", "--optimizer.lr", "1"], "holds checkpoints and --resume is never"),
        (["--resume", "nonexist", "--optimizer.lr", "1"], "nonexist: there is no such folder"),
        (
            ["--resume", LAST, "--objective.kl", "0", "--objective.tv", "1"],
            "these values differ: objective.kl, objective.tv",
        ),
        (["--resume", LAST, "--out", "elsewhere", "--model.hidden", "32"], "these values differ: model.hidden"),
        (["--resume", "auto", "--loop.seed", "9"], "these values differ: loop.seed"),
        (["--eval.seed", "7", "--eval.limit", "1"], "these values differ: eval.seed."),
    ],
)
def test_a_refused_call_changes_nothing(run: Path, more: list[str], reason: str, capfd: Captured) -> None:
    places = {LAST: str(run / LAST), "elsewhere": str(run.parent / "elsewhere")}
    before = content(run)
    assert main(words(run, *(places.get(word, word) for word in more))) == 2
    assert reason in capfd.readouterr().err
    assert content(run) == before
    assert not (run.parent / "elsewhere").exists()


def test_a_value_that_nobody_reads_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE.replace("distill", "medusa"))
    assert main(words(tmp_path / "run", "--rollouts.share", "0.5")) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("checkpoints", "file", "checkpoints is a file, where the run writes a folder"),
        ("drafter", "file", "drafter is a file, where the run writes a folder"),
        ("metrics.jsonl", "folder", "metrics.jsonl is a folder, where the run writes a file"),
        ("status.json", "folder", "status.json is a folder, where the run writes a file"),
        ("run.yaml", "folder", "run.yaml is a folder, where the run writes a file"),
    ],
)
def test_what_is_in_the_way_is_found_before_the_work(
    name: str, kind: str, reason: str, tmp_path: Path, capfd: Captured
) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    (tmp_path / "run").mkdir()
    if kind == "file":
        (tmp_path / "run" / name).write_text("mine")
    else:
        (tmp_path / "run" / name).mkdir()
    assert main(words(tmp_path / "run")) == 2
    assert reason in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name]


@pytest.mark.parametrize(
    ("out", "code", "reason"),
    [
        ("", 2, "--out: the value is empty"),
        ("a\0b", 2, "holds control characters"),
        ("x" * 300, 2, "300 bytes in one name; expected names of at most 200"),
        ("d/" * 3000, 2, "name another folder"),
        ("/proc/run", 4, "cannot write to /proc/run"),
        ("small.yaml/run", 2, "small.yaml is a file; name another folder"),
    ],
)
def test_a_folder_that_cannot_be(
    out: str, code: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "./small.yaml", "--out", out]) == code
    said = capfd.readouterr().err
    assert reason in said
    assert len(said) < 400
    assert main(["train", "./small.yaml", f"--out={out}"]) == code
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
    if not out:
        with pytest.raises(RequestError, match="out is empty"):
            train.train("./small.yaml", out=out)


def change_manifest(run: Path, **entries: Any) -> None:
    """Other entries in the manifest of the last checkpoint; None takes one out."""
    path = run / LAST / "manifest.json"
    content = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.mark.run
def test_a_checkpoint_of_another_run_is_not_taken_as_its_own(run: Path, capfd: Captured) -> None:
    """Two runs that met in a folder left such, and the next start took them."""
    out = run.parent / "mixed"
    shutil.copytree(run, out)
    recipe = json.loads((out / LAST / "manifest.json").read_text())["recipe"]
    change_manifest(out, recipe=recipe | {"loop.seed": 7})
    before = content(out)
    for place in ([], ["--resume", str(out / LAST), "--out", str(run.parent / "nowhere")]):
        assert main(words(out, *place)) == 2
        message = capfd.readouterr().err
        assert (
            "step-00000004 was made for something else: loop.seed is 7 there and 0 here. It is of another" in message
        )
    assert content(out) == before
    assert not (run.parent / "nowhere").exists()


@pytest.mark.slow
@pytest.mark.run
def test_a_checkpoint_of_an_earlier_version_goes_on(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An early one wrote neither; and a value that a later version has added was what it is by default."""
    recipe = json.loads((run / LAST / "manifest.json").read_text())["recipe"]
    fewer = {name: value for name, value in recipe.items() if name != "loop.seed"}
    nothing = dict.fromkeys(("recipe", "processes", "threads", "micro_rows"))
    for name, entries in (("plain", nothing), ("fewer", {"recipe": fewer})):
        out = run.parent / name
        shutil.copytree(run, out)
        change_manifest(out, **entries)
        check_resume(out, load_recipe(str(out / "run.yaml")).recipe, "auto")
    assert main(words(run.parent / "plain")) == 0
    assert "no longer the same bits" not in caplog.text


@pytest.mark.run
@pytest.mark.parametrize(
    ("there", "more", "said"),
    [
        pytest.param({"processes": 2}, [], "processes 2 before and 1 now", marks=pytest.mark.slow),
        pytest.param({"threads": 7}, [], "threads 7 before and {threads} now", marks=pytest.mark.slow),
        ({}, ["--loop.micro_rows", "1"], "micro_rows 2 before and 1 now"),
        ({"processes": 4, "threads": 7}, [], "processes 4 before and 1 now, threads 7 before and {threads} now"),
    ],
)
def test_what_sums_are_rounded_by_is_said_in_a_line(
    there: dict[str, int], more: list[str], said: str, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = run.parent / tmp_path.name  # beside the recipe
    shutil.copytree(run, out)
    change_manifest(out, **there)
    assert main(words(out, *more)) == 0
    (line,) = [each for each in caplog.messages if "goes on otherwise" in each]
    assert f"otherwise: {said.format(threads=torch.get_num_threads())}. The same rows" in line
    assert line.endswith("the rest is no longer the same bits")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_before_the_first_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.setattr(train, "_train_method", lambda *_: signal.raise_signal(signal.Signals[name]))
    assert main(words(tmp_path / "run")) == 75
    assert status(tmp_path / "run") == ("stopped", 75)
    assert f"{name}: stopped outside of the steps; the same command goes on" in capfd.readouterr().err


@pytest.mark.run
def test_what_kills_have_left_goes_at_the_next_start(run: Path, tmp_path: Path) -> None:
    """Half files, half folders, half deleted checkpoints; never what a living process writes."""
    out, living = run.parent / "left", f".staging-{this_host()}-{os.getppid()}-drafter"
    shutil.copytree(run, out)
    before = content(out)
    dead = [
        f".staging-{this_host()}-99999999-status.json",
        ".staging-elsewhere-1-drafter",
        ".old-elsewhere-1-drafter",
        f".staging-{this_host()}-99999999-x",
    ]
    for name in [*dead, living, "checkpoints/.staging-elsewhere-1-step-00000009", "checkpoints/step-00000001"]:
        (out / name).mkdir()
        (out / name / "half").write_text("half")
    assert main(words(out)) == 0
    assert {path for path in content(out) if "metrics" not in path and not path.endswith(".lock")} == {
        path for path in before if "metrics" not in path and not path.endswith(".lock")
    } | {str(out / living / "half")}


@pytest.mark.run
def test_a_checkpoint_that_nothing_tells_of_must_fit(run: Path, tmp_path: Path, capfd: Captured) -> None:
    """Copied out of its run, of an earlier version and with no recipe above it: its tensors say what it is of."""
    shutil.copytree(run / LAST, tmp_path / "kept" / "step-00000004")
    manifest = tmp_path / "kept" / "step-00000004" / "manifest.json"
    manifest.write_text(json.dumps({name: json.loads(manifest.read_text())[name] for name in ("format", "files")}))
    shutil.copy(run.parent / "small.yaml", tmp_path)
    place = ["--resume", str(tmp_path / "kept" / "step-00000004")]
    assert main(words(tmp_path / "other", *place, "--model.hidden", "32")) == 2
    assert "holds other weights than this recipe trains" in capfd.readouterr().err
    assert status(tmp_path / "other") == ("failed", 2)
    assert main(words(tmp_path / "same", *place)) == 0


@pytest.mark.run
def test_a_checkpoint_of_another_folder_ends_with_a_drafter(run: Path) -> None:
    out = run.parent / "continued"
    assert main(words(out, "--resume", str(run / LAST))) == 0
    name = "drafter/model.safetensors"
    assert (out / name).read_bytes() == (run / name).read_bytes()
    assert status(out) == ("finished", 0)


@pytest.mark.run
def test_other_defaults_of_what_the_method_does_not_read(run: Path) -> None:
    """As after a new version of the package: the saved recipe has the values of the old one."""
    out = run.parent / "older"
    shutil.copytree(run, out)
    saved = (out / "run.yaml").read_text()
    for line in ("match_tokens: ", "guesses: "):
        at = saved.index(line) + len(line)
        saved = f"{saved[:at]}7{saved[saved.index(chr(10), at) :]}"
    (out / "run.yaml").write_text(saved)
    assert main(words(out)) == 0


READ = re.compile(r"\brecipe\.(\w+)")
SHARED = {"target", "features", "probe", "tokenizer"}


def sections_read(module: str) -> set[str]:
    """Sections that a method's module reads, or what it imports from the trainers' room."""
    room, seen, waiting = Path(draftsmith.__file__).parent / "trainers", set(), [module]
    text = ""
    while waiting:
        name = waiting.pop()
        path = room / f"{name.replace('.', '/')}.py"
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        source = path.read_text(encoding="utf-8")
        text += source
        waiting += [
            f"{part}.{each}"
            for part in ("teacher", "student", "boosting", "own_drafts")
            for each in re.findall(rf"from \.+{part}\.(\w+)", source)
        ]
        if name != module or "." in module:
            waiting += [f"{name.split('.')[0]}.{each}" for each in re.findall(r"from \.(\w+) import", source)]
    return set(READ.findall(text)) & Recipe.model_fields.keys()


@pytest.mark.parametrize("method", METHODS)
def test_what_each_method_reads(method: str) -> None:
    """Its code reads every section that its record names, and its own file none that it does not."""
    record = METHODS[method]
    known = own_sections().keys() | SHARED
    named = {each.split(".")[0] for each in (*record.sections, *record.reads)}
    module = record.module.removeprefix(".") or method
    path = Path(draftsmith.__file__).parent / "trainers" / f"{module.replace('.', '/')}.py"
    own_file = path.read_text(encoding="utf-8")
    assert set(READ.findall(own_file)) & known <= named
    assert named & known <= sections_read(module) | {"probe"}  # `launch/train` decodes what probes ask for
    assert known <= Recipe.model_fields.keys()


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (RequestError("why"), "failed", 2),
        (DataError("why"), "failed", 3),
        (OSError(errno.ENOSPC, "No space left on device"), "failed", 4),
        (Exception("No space left on device (os error 28)"), "failed", 4),
        (TrainingFailed("why"), "failed", 5),
        (RuntimeError("out of memory"), "failed", 5),
        (OSError(errno.EACCES, "Permission denied"), "failed", 4),
        (KeyboardInterrupt(), "failed", 130),
        (Stopped("why"), "stopped", 75),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_status_of_every_end(
    error: BaseException,
    state: str,
    code: int,
    rank: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Captured,
) -> None:
    """The exit code, of whichever process failed, and never `running`."""

    def fail(*_: object) -> None:
        raise error

    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.setattr(train, "_train_method", fail)
    monkeypatch.setenv("RANK", rank)
    assert main(words(tmp_path / "run")) == code
    assert status(tmp_path / "run") == (state, code)
    full = "MB are free" in (message := capfd.readouterr().err)
    assert full == ("run the same command again" in message) == ("space" in str(error))


def test_what_failed_first_stays_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others fail in its wake, for want of it."""
    first, second = Status(tmp_path), Status(tmp_path)
    first.write("running", None)
    first.fail(DataError("no rows"))
    second.fail(RuntimeError("connection closed by peer"))
    assert status(tmp_path) == ("failed", 3)


def test_a_launch_that_is_refused_leaves_the_status_of_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other processes fail too, as they are ended."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "1")

    def fail(port: str) -> None:
        os.environ["MASTER_PORT"] = port
        Status(tmp_path).fail(RuntimeError("ended"))

    with hold(tmp_path):
        assert copy_does(lambda: fail("2")) == 0
        assert not (tmp_path / "status.json").exists()
        assert copy_does(lambda: fail("1")) == 0
        assert status(tmp_path) == ("failed", 5)


def test_a_full_disk_has_room_for_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Status(tmp_path)
    told.write("running", None)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_file, "write_text", full)
    told.fail(RuntimeError("x" * 10_000))
    assert status(tmp_path) == ("failed", 5)
