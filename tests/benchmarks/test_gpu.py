"""The plan for a GPU as far as a CPU can check it: it fits its time, nothing takes another along, figures come home."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.benchmarks.common import gpu_front
from draftsmith.benchmarks.common.gpu_front import Part, Went, compact, problems_in
from draftsmith.benchmarks.common.provenance import commit
from draftsmith.benchmarks.common.records import FOLDER, Record, read_record, read_records
from draftsmith.benchmarks.on_gpu import calls, sections
from draftsmith.benchmarks.on_gpu.arms import Arms
from draftsmith.benchmarks.on_gpu.sections import SECTIONS, Section
from draftsmith.benchmarks.on_gpu.setting import NOMINAL, Setting, tiny
from draftsmith.benchmarks.on_gpu.shapes import QWEN3_8B, SHAPES, target_of
from draftsmith.decoding.target.lean import on_cuda
from draftsmith.eval.measure.speed import bytes_of
from draftsmith.trainers.loop import optimizer
from scripts import SCRIPTS, load

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


# ---- sections ----------------------------------------------------------------------------------


def a_record(setting: Setting, number: int) -> Record:
    return setting.record([{"number": str(number)}], "A setup.", title="A title")


def yielding(*given: int | Exception) -> Any:
    def measure(setting: Setting) -> Iterator[Record]:
        for each in given:
            if isinstance(each, Exception):
                raise each
            yield a_record(setting, each)

    return measure


def test_a_section_that_fails_keeps_what_it_had_and_the_next_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        Section("bad", "bad.json", 60, yielding(1, 2, ValueError("why"), 3)),
        Section("good", "good.json", 60, yielding(4)),
    ]
    assert sections.run(asked, tiny(tmp_path)) == 1
    assert read_record(tmp_path / "bad.json").rows == [{"number": "2"}]
    assert read_record(tmp_path / "good.json").command == "python3 benchmarks/gpu.py --sections good"
    printed = capsys.readouterr().out
    assert "ValueError: why" in printed
    assert "section bad: failed: ValueError" in printed
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert {name: each["outcome"] for name, each in progress.items()} == {
        "bad": "failed: ValueError",
        "good": "passed",
    }


def test_behind_an_unusable_device_the_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "release", lambda _: (_ for _ in ()).throw(RuntimeError("CUDA error")))
    asked = [Section(name, f"{name}.json", 60, yielding(1)) for name in ("first", "second")]
    assert sections.run(asked, tiny(tmp_path)) == gpu_front.UNUSABLE
    assert not (tmp_path / "second.json").exists()


def test_without_our_kernels_the_lean_forward_is_torchs(tmp_path: Path) -> None:
    seen = []

    def measure(setting: Setting) -> Iterator[Record]:
        seen.append(type(on_cuda._steps()))
        yield a_record(setting, 1)

    setting = replace(tiny(tmp_path), own_kernels=False)
    assert sections.run([Section("a", "a.json", 60, measure)], setting) == 0
    assert seen == [on_cuda.Plain]
    assert read_record(tmp_path / "a.json").notes == ["Without kernels of our own: they ended a process."]


def test_an_arm_that_fails_takes_no_other_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be recorded is timed as it is launched; what does not run at all is left out."""

    def refuse(call: Any, _device: torch.device) -> Any:
        raise RuntimeError("no graph\nmore")

    monkeypatch.setattr("draftsmith.benchmarks.on_gpu.arms.recorded", refuse)
    arms = Arms(tiny(tmp_path))
    arms.add("runs", lambda: torch.ones(1))
    arms.add("broken", lambda: torch.ones(2) @ torch.ones(3))
    assert set(arms.times()) == {"runs"}
    assert arms.problems[0] == "runs: not recorded as a graph, so eager: RuntimeError: no graph"
    assert arms.problems[2].startswith("broken: RuntimeError: ")


def test_bytes_by_hand() -> None:
    # Qwen3-8B in bf16: keys and values, 36 layers of 8 heads of 128, two bytes each
    assert QWEN3_8B.kv_bytes(1, torch.bfloat16) == 2 * 36 * 8 * 128 * 2
    # per layer: q and o 32x64, k and v 32x32, three of the MLP, norms of 32 twice, 16 twice; a norm and the head
    small = tiny(Path()).shapes["Qwen3-8B"]
    layer = 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 64 + 2 * 32 + 2 * 16
    target = target_of(small, torch.device("cpu"), torch.float32, positions=64)
    assert bytes_of(target.model) == 4 * (4 * layer + 32 + 128 * 32)


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen3-8B", 8.19), ("Qwen3-4B", 4.02), ("Qwen3-1.7B", 1.72), ("Llama-3.2-1B", 1.24)]
)
def test_shapes_have_the_weights_that_their_names_promise(name: str, billions: float) -> None:
    """As their cards say; on the meta device."""
    model = target_of(SHAPES[name], torch.device("meta"), torch.bfloat16, positions=64).model
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.006)


def test_bandwidth_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = replace(tiny(tmp_path), known={"copy": 3e12})
    monkeypatch.setattr(Setting, "nominal", NOMINAL["H100"])
    assert calls.bandwidth(setting, 12e9, 0.008) == "8.000 ms, 44.8% of nominal, 50.0% of a copy"


def test_a_step_is_the_difference_of_two_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([(9.0, 2), (9.0, 4), (1.0, 2), (3.0, 6), (1.0, 2), (2.0, 4)])
    monkeypatch.setattr(calls, "timed", lambda *_: next(taken))
    # the first round warms up; (3 - 1) / 4 and (2 - 1) / 2
    assert calls.seconds_a_call(lambda _: None, (8, 72), 2, torch.device("cpu")) == 0.5  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_part_killed_at_any_second_keeps_its_finished_sections(tmp_path: Path) -> None:
    """The real sections; the moment is drawn anew in every run, and named where it fails."""
    names = ["card", "samplers", "1b", "profile"]
    words = [str(SCRIPTS / "gpu_measure.py"), "--tiny", "--out", str(tmp_path), "--sections", ",".join(names)]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert "section card: passed" in process.stdout.readline()
    seconds = random.uniform(0, 8)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    progress = json.loads((tmp_path / "progress.json").read_text())
    finished = [name for name, each in progress.items() if each["outcome"] == "passed"]
    assert "card" in finished, seconds
    known = {section.name: section for section in SECTIONS}
    for name in finished:
        assert read_record(tmp_path / known[name].record).rows, f"{name}, killed after {seconds} s"


@pytest.mark.slow
def test_tiny_sections_write_the_records_that_the_page_shows(tmp_path: Path) -> None:
    """With the tables that the page's markers name, so that a run on a GPU leaves pages and records in step."""
    assert load("gpu_measure").main(["--tiny", "--out", str(tmp_path)]) == 0
    shown = read_records()
    for section in SECTIONS:
        record = read_record(tmp_path / section.record)
        assert record.rows
        assert not [note for note in record.notes if "Error" in note]
        expected = shown[section.record.removesuffix(".json")]
        assert list(record.tables) == list(expected.tables)
        for table, each in record.tables.items():
            assert [column.head for column in each.columns] == [
                column.head for column in expected.tables[table].columns
            ]


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
    assert step_gpu.measured(step_gpu.TINY, recompute=False, chunk=8)["update"] > 0
    assert [each.defaults["fused"] for each in made] == [fused]


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
