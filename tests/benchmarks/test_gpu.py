"""The plan for a GPU as far as a CPU can check it: it fits its time, nothing takes another along, figures come home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from draftsmith.benchmarks.common import gpu_front
from draftsmith.benchmarks.common.gpu_front import Part, Went, compact, problems_in
from draftsmith.benchmarks.common.provenance import commit
from draftsmith.benchmarks.common.records import FOLDER, Record, read_record, read_records
from draftsmith.benchmarks.on_gpu.sections import SECTIONS
from helpers.benchmark_scripts import SCRIPTS, load

gpu = load("gpu")
ROOT = SCRIPTS.parent
PAGE = (FOLDER / "gpu.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _no_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of a developer are of no concern here."""
    monkeypatch.setattr(gpu, "WHEELS", tmp_path / ".wheels")


# ---- the plan ----------------------------------------------------------------------------------


def test_all_parts_together_fit_into_seven_minutes() -> None:
    assert sum(part.seconds for part in gpu.PARTS) <= gpu.BUDGET <= 420


def test_sections_are_those_of_the_script_in_its_order() -> None:
    """The front knows them by name alone: it imports nothing that the machine may lack."""
    assert tuple(section.name for section in SECTIONS) == gpu.SECTIONS
    assert sum((part.sections for part in gpu.PARTS), ()) == gpu.SECTIONS


def test_every_section_has_a_record_that_a_page_shows() -> None:
    records = read_records()
    for section in SECTIONS:
        record = records[section.record.removesuffix(".json")]
        assert record.command == f"python3 benchmarks/gpu.py --sections {section.name}"
    assert [row["part"] for row in records["gpu"].rows] == [*gpu.SECTIONS, "tests"]
    for name in (*gpu.SECTIONS, "tests"):
        assert f"`{name}`" in PAGE, f"the plan does not name {name}"


def test_no_test_of_a_gpu_is_forgotten() -> None:
    assert {f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py")} <= set(gpu.TESTS)
    for test in gpu.TESTS:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists()
        assert f"def {name}" in (ROOT / file).read_text() if name else True


def test_parts_and_sections_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    args = gpu.arguments(["--sections", "8b,profile", "--parts", "measure,profile"])
    assert [(part.name, part.sections) for part in gpu.chosen(args)] == [
        ("measure", ("8b",)),
        ("profile", ("profile",)),
    ]
    words = gpu.chosen(gpu.arguments(["--sections", "profile", "--parts", "measure,tests"]))[0].words
    assert words[0] == "benchmarks/gpu_tests.py"
    assert load("gpu_tests").arguments(list(words[1:])).workers == 8
    with pytest.raises(SystemExit):
        gpu.arguments(["--sections", "9b"])
    assert "no section is called 9b; there are card, 8b" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "gpu: no CUDA device is visible; --rehearse runs the plan on a CPU, and `make test` shows everything else"
    ]


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "NEEDED", {"json": "json", "no-such-package": "no_such_package"})
    assert gpu.main([]) == 2
    said = capsys.readouterr().err
    assert "lacks no-such-package; run `make gpu-wheels` where there is a network" in said


def test_a_copy_without_history_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_COMMIT", "abcdef0")
    assert commit() == "abcdef0"


# ---- parts -------------------------------------------------------------------------------------

SECTIONED = """
import json, os, pathlib, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out, safe = pathlib.Path(given["--out"]), "--torch-alone" in sys.argv
path = out / "progress.json"
for name in given["--sections"].split(","):
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {name: {"outcome": "begun", "seconds": 0, "record": name + ".json"}}))
    if name == "hangs":
        os._exit(1)
    if name == "breaks" and not safe:
        os._exit(75)
    if name == "sleeps":
        time.sleep(60)
    known[name] = {"outcome": "passed", "seconds": 0, "record": name + ".json"}
    path.write_text(json.dumps(known))
    print(name, safe)
"""


def went(tmp_path: Path, *names: str, seconds: float = 60, within: float = 60) -> Went:
    return gpu_front.run(Part("some", ("-c", SECTIONED), seconds, names), tmp_path, dict(os.environ), within=within)


def outcomes(went: Went) -> list[str]:
    return [row["outcome"] for row in went.rows]


def test_sections_behind_one_that_ends_the_process_still_run(tmp_path: Path) -> None:
    done = went(tmp_path, "first", "hangs", "last")
    assert outcomes(done) == ["passed", "cut off", "passed"]
    assert done.outcome == "failed (hangs)"


def test_one_that_leaves_the_device_unusable_is_tried_without_our_kernels(tmp_path: Path) -> None:
    done = went(tmp_path, "first", "breaks", "last")
    assert outcomes(done) == ["passed"] * 3
    assert done.outcome == "passed"
    assert (tmp_path / "gpu-some.log").read_text().splitlines() == ["first False", "breaks True", "last True"]


def test_a_late_part_is_killed_and_keeps_its_sections(tmp_path: Path) -> None:
    done = went(tmp_path, "first", "sleeps", "last", seconds=1)
    assert done.outcome == "late"
    assert outcomes(done) == ["passed", "cut off", "not begun: late"]
    assert went(tmp_path, "first", within=-1).outcome == "late"


def test_no_part_takes_another_along(tmp_path: Path) -> None:
    writing = "import sys; open(sys.argv[-1], 'w').write('{}')"
    bad, good = (
        gpu_front.run(Part(name, ("-c", code), 30), tmp_path, dict(os.environ), within=30)
        for name, code in (("bad", "print('why'); raise SystemExit(3)"), ("good", writing))
    )
    assert (bad.outcome, bad.end, bad.rows[0]["record"]) == ("failed (exit code 3)", "why", None)
    assert (good.outcome, good.rows[0]["record"]) == ("passed", "gpu-good.json")


def test_how_parts_went_is_a_record(tmp_path: Path) -> None:
    went = Went(
        "measure", "failed (8b)", 3.0, "why", [{"part": "8b", "outcome": "cut off", "seconds": 2.0, "record": None}]
    )
    args = gpu.arguments(["--out", str(tmp_path), "--sections", "8b"])
    assert gpu.write_record([went], args, tmp_path, dict(os.environ))
    record = read_record(tmp_path / "gpu.json")
    assert record.command == "python3 benchmarks/gpu.py --parts measure,profile,tests --sections 8b"
    rows = {row["part"]: row["outcome"] for row in record.rows}
    assert rows == dict.fromkeys((*gpu.SECTIONS, "tests"), "not run") | {"8b": "cut off"}
    assert record.notes == ["measure: why"]
    assert set(record.tables) == set(read_records()["gpu"].tables)


def test_all_figures_stand_in_one_short_table(tmp_path: Path) -> None:
    record = {
        "formats": {"ms": ".2f"},
        "rows": [{"part": "calls", "nodes": "1", "ms": 1.234, "goal": ""}],
        "notes": ["n"],
    }
    (tmp_path / "a.json").write_text(json.dumps(record))
    rows = [
        {"part": "a", "outcome": "passed", "seconds": 1.0, "record": "a.json"},
        {"part": "b", "outcome": "cut off"},
    ]
    assert compact(tmp_path, [Went("some", "late", 1.0, "", rows)]).splitlines() == [
        "a: passed, 1.0 s",
        "  1 | 1.23",
        "  ! n",
        "b: cut off, 0.0 s",
    ]
    (tmp_path / "a.json").write_text(json.dumps(record | {"notes": ["long"] * 5000}))
    assert len(compact(tmp_path, [Went("some", "late", 1.0, "", rows)])) < 11_000


def test_a_rehearsal_says_what_would_be_lost(tmp_path: Path) -> None:
    assert problems_in(tmp_path, ["a"]) == [f"{tmp_path / 'gpu.json'} was not written"]
    rows = [
        {"part": "a", "outcome": "passed", "record": "a.json"},
        {"part": "b", "outcome": "passed", "record": None},
        {"part": "c", "outcome": "cut off", "record": "a.json"},
    ]
    (tmp_path / "gpu.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "a.json").write_text(json.dumps({"notes": ["an arm: ValueError: no", "a word"]}))
    assert problems_in(tmp_path, ["a", "b", "c", "d"]) == [
        "a: an arm: ValueError: no",
        "b: no record",
        "c: cut off",
        "c: an arm: ValueError: no",
        "d: not there",
        "d: no record",
    ]


# ---- tests -------------------------------------------------------------------------------------


@pytest.fixture
def some_tests(tmp_path: Path) -> list[str]:
    """One file that passes, one with everything that can go wrong."""
    (tmp_path / "test_good.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "test_mixed.py").write_text(
        "import pytest\n\ndef test_it():\n    pass\n\ndef test_bad():\n    assert 1 == 2\n\n"
        "def test_not_here():\n    pytest.skip('needs a CUDA GPU')\n\n"
        "@pytest.fixture\ndef broken():\n    raise OSError\n\ndef test_of_it(broken):\n    pass\n"
    )
    (tmp_path / "test_unread.py").write_text("import no_such_module\n")
    return [str(path) for path in sorted(tmp_path.glob("test_*.py"))]


@pytest.mark.slow
def test_tests_leave_a_record_of_what_was_run(some_tests: list[str], tmp_path: Path) -> None:
    code, record = record_of_tests(some_tests[:2], tmp_path)
    assert code != 0
    counts = {str(row["file"]).rpartition("/")[2].strip("`"): row for row in record.rows}
    kinds = ("passed", "failed", "skipped", "late")
    assert [counts["test_good.py"][kind] for kind in kinds] == [1, 0, 0, 0]
    assert [counts["test_mixed.py"][kind] for kind in kinds] == [1, 2, 1, 0]
    assert [counts["all"][kind] for kind in kinds] == [2, 2, 1, 0]
    assert "test_bad" in record.notes[0]
    assert record.notes[1] == "Left out, 1: needs a CUDA GPU."
    assert record.versions["torch"] == torch.__version__


@pytest.mark.slow
def test_what_was_not_tested_is_no_success(some_tests: list[str], tmp_path: Path) -> None:
    """Without time, without a module, with nothing but skips."""
    assert record_of_tests(some_tests[:1], tmp_path)[0] == 0
    code, record = record_of_tests(some_tests[:1], tmp_path, "--seconds", "-1")
    assert (code, record.rows[-1]["late"], record.rows[-1]["passed"]) == (1, 1, 0)
    code, record = record_of_tests(some_tests[2:], tmp_path)
    assert (code, record.rows[-1]["failed"]) == (2, 1)
    Path(some_tests[0]).write_text("import pytest\n\ndef test_it():\n    pytest.skip('why')\n")
    assert record_of_tests(some_tests[:1], tmp_path)[0] == 1


def record_of_tests(files: list[str], folder: Path, *words: str) -> tuple[int, Record]:
    """What `gpu_tests.py` answers and writes, in a process of its own: pytest does not run in pytest."""
    path = folder / "tested.json"
    command = [sys.executable, str(SCRIPTS / "gpu_tests.py"), *files, *words, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS.parent)
    return done.returncode, read_record(path)


def test_wheels_stand_in_for_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package that the machine lacks is found behind its own; one that no wheel holds is still named."""
    monkeypatch.setattr(gpu, "NEEDED", {"json": "json", "brought": "brought_along", "other": "not_brought"})
    name = "brought_along-1.0-py3-none-any.whl"
    gpu.WHEELS.mkdir()
    with zipfile.ZipFile(gpu.WHEELS / name, "w") as wheel:
        meta = "brought_along-1.0.dist-info"
        wheel.writestr("brought_along.py", "")
        wheel.writestr(f"{meta}/METADATA", "Metadata-Version: 2.1\nName: brought-along\nVersion: 1.0\n")
        wheel.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{meta}/RECORD", "")
    assert gpu.main([]) == 2
    assert "lacks other;" in capsys.readouterr().err


def test_another_machine_is_given_what_git_does_not_ignore(tmp_path: Path) -> None:
    """By the rules of .gitignore: a folder `runs` of the checkout stays behind, one of the tests goes along."""
    root = tmp_path / "own"
    for name in ("a.py", "tests/helpers/runs/b.py", "runs/c.json", "gone.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / ".gitignore").write_text("/runs/\n")
    for words in (["init", "-q"], ["add", "a.py", "gone.py"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    (root / "gone.py").unlink()
    to = gpu_front.copied_checkout(root, tmp_path / "copy")
    given = {str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()}
    assert given == {"a.py", "tests/helpers/runs/b.py", ".gitignore"}
