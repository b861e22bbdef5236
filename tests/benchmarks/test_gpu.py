"""`make gpu` as far as a CPU can check it: its parts exist, fit their time, and none takes another along."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.benchmarks.common.records import Record, Table, read_record, read_records
from draftsmith.trainers.loop import optimizer
from scripts import SCRIPTS, load

gpu = load("gpu")
TESTS = [part for part in gpu.PARTS if part.words[0] == "benchmarks/gpu_tests.py"]
TINY = {
    "decode_gpu": ("decode-gpu", "--tiny"),
    "samplers": ("samplers", "--tiny"),
    "step_gpu": ("step-gpu", "--tiny"),
    "loss_memory": ("loss-memory-gpu", "--vocabulary 500 --positions 64 --hidden 16"),
    "row_memory": ("row-memory-gpu", "--tokens 64 --hidden 16 --most-gb 1"),
}


@pytest.fixture(autouse=True)
def _no_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of a developer are of no concern here."""
    monkeypatch.setattr(gpu, "WHEELS", tmp_path / ".wheels")


def test_all_parts_together_fit_into_nine_minutes() -> None:
    assert sum(part.seconds for part in gpu.PARTS) <= gpu.BUDGET


@pytest.mark.parametrize("part", gpu.PARTS, ids=lambda part: part.name)
def test_a_script_takes_its_arguments(part: gpu.Part, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that it is given, and the record's file."""
    script: ModuleType = load(Path(part.words[0]).stem)
    words = [*part.words[1:], "--json", str(tmp_path / part.record)]
    monkeypatch.setattr(sys, "argv", [part.words[0], *words])
    if hasattr(script, "_arguments"):
        args = script._arguments(words)
    else:
        args = script.arguments(*([words] if script.arguments.__code__.co_argcount else []))
    assert args.json == tmp_path / part.record


@pytest.mark.parametrize("part", TESTS, ids=lambda part: part.name)
def test_a_part_of_tests_names_some(part: gpu.Part) -> None:
    args = load("gpu_tests").arguments(list(part.words[1:]))
    assert args.tests
    assert all((SCRIPTS.parent / test).exists() for test in args.tests)
    assert 5 < args.seconds < part.seconds


def test_no_test_of_a_gpu_is_forgotten() -> None:
    named = {word for part in TESTS for word in part.words}
    assert {f"tests/gpu/{file.name}" for file in (SCRIPTS.parent / "tests" / "gpu").glob("test_*.py")} <= named


def test_every_part_has_a_record_that_a_page_shows() -> None:
    """Before its first run too, so that a run changes figures alone (`test_tables.py` holds records to pages)."""
    records = read_records()
    for part in gpu.PARTS:
        assert part.record.removesuffix(".json") in records, part.name
    shown = [row["part"] for row in records["gpu"].rows]
    assert shown == [part.name for part in gpu.PARTS]


@pytest.mark.slow
def test_no_part_takes_another_along(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that fails and one that is late are said to; the last still runs."""
    writing = "import sys; open(sys.argv[-1], 'w').write('{}')"
    parts = (
        gpu.Part("bad", ("-c", "print('why'); raise SystemExit(3)"), 30, "bad.json"),
        gpu.Part("slow", ("-c", "import time; time.sleep(60)"), 1, "slow.json"),
        gpu.Part("good", ("-c", writing), 30, "good.json"),
        gpu.Part("other", ("-c", "raise SystemExit(4)"), 30, "other.json"),
    )
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "missing", lambda *_: None)
    (tmp_path / "bad.json").write_text("of an earlier run")
    assert gpu.main(["--out", str(tmp_path), "--parts", "bad,slow,good"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "bad            failed (exit code 3)" in lines[-5]
    assert lines[-4].strip() == "why"
    assert lines[-3].startswith("slow           late")
    assert lines[-1].endswith("good.json")
    assert (tmp_path / "good.json").read_text() == "{}"
    record = read_record(tmp_path / "gpu.json")
    assert record.command == "python benchmarks/gpu.py --parts bad,slow,good"
    assert record.origin == "measured"
    assert [(row["part"], row["outcome"], row.get("record")) for row in record.rows] == [
        ("bad", "failed (exit code 3)", None),
        ("slow", "late", None),
        ("good", "passed", "good.json"),
        ("other", "not run", None),
    ]
    assert record.notes == ["bad: why", "slow: "]
    assert set(record.tables) == set(read_records()["gpu"].tables)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "gpu: no CUDA device is visible; everything else is shown by `make test` on a CPU"
    ]


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "NEEDED", {"json": "json", "no-such-package": "no_such_package"})
    assert gpu.main([]) == 2
    said = capsys.readouterr().err
    assert "lacks no-such-package; run `make gpu-wheels` where there is a network" in said


@pytest.mark.slow
def test_parts_import_without_what_a_machine_may_lack() -> None:
    scripts = [str(SCRIPTS.parent / part.words[0]) for part in gpu.PARTS]
    code = (
        "import runpy, sys\n"
        "for name in ('datasets', 'deepspeed', 'peft', 'pydivsufsort', 'torchao', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        f"for script in {scripts!r}:\n"
        "    runpy.run_path(script, run_name='imported')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", TINY)
def test_tiny_runs_write_the_record_that_a_page_shows(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tables that the page's markers name, so that a run on a GPU leaves pages and records in step."""
    path = tmp_path / "record.json"
    name, flags = TINY[script]
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{script}.py", *flags.split(), "--json", str(path)])
    module = load(script)
    module.main(*([sys.argv[1:]] if module.main.__code__.co_argcount else []))
    record = Record.model_validate_json(path.read_text())
    assert "checks the script, measures nothing" in record.setup or "--tiny" not in flags
    assert record.rows
    expected = read_records()[name]
    assert list(record.tables) == list(expected.tables)
    for table, each in record.tables.items():
        assert heads_of(each) == heads_of(expected.tables[table])


def heads_of(table: Table) -> list[str]:
    return [column.head.strip() for column in table.columns]


@pytest.mark.parametrize("fused", [True, False])
def test_a_measured_step_is_updated_as_the_loop_does(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By AdamW's fused form where the loop takes it; a CPU has one too, which stands in for the device's."""
    step_gpu, made = load("step_gpu"), []
    build = optimizer.build

    def noted(*given: Any, **how: Any) -> list[torch.optim.Optimizer]:
        made.extend(built := build(*given, **how))
        return built

    monkeypatch.setattr(optimizer, "fuses", lambda _: fused)
    monkeypatch.setattr(optimizer, "build", noted)
    assert step_gpu.measured(step_gpu.TINY, recompute=False)["update"] > 0
    assert [each.defaults["fused"] for each in made] == [fused]


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
