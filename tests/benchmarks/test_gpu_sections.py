"""Sections of the plan for a GPU: each keeps what it had, takes no other along, and its arithmetic by hand."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.benchmarks.common import gpu_front
from draftsmith.benchmarks.common.records import Record, read_record, read_records
from draftsmith.benchmarks.on_gpu import calls, sections
from draftsmith.benchmarks.on_gpu.arms import Arms
from draftsmith.benchmarks.on_gpu.sections import SECTIONS, Section
from draftsmith.benchmarks.on_gpu.setting import NOMINAL, Setting, tiny
from draftsmith.benchmarks.on_gpu.shapes import QWEN3_8B, SHAPES, target_of
from draftsmith.decoding import kernels
from draftsmith.eval.measure.speed import bytes_of
from draftsmith.trainers.loop import optimizer
from helpers.benchmark_scripts import SCRIPTS, load


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


def test_without_our_kernels_none_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(kernels, "available", lambda: True)

    def measure(setting: Setting) -> Iterator[Record]:
        seen.append(kernels.available())
        yield a_record(setting, 1)

    setting = replace(tiny(tmp_path), own_kernels=False)
    assert sections.run([Section("a", "a.json", 60, measure)], setting) == 0
    assert seen == [False]
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
