"""`make gpu` as far as a CPU can check it: its parts exist, fit their time, and none takes another along."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
from draftsmith.benchmarks.common.records import Record
from scripts import SCRIPTS, load

gpu = load("gpu")
SCRIPTED = [part for part in gpu.PARTS if part.words[0].endswith(".py")]


@pytest.fixture(autouse=True)
def _no_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of a developer are of no concern here."""
    monkeypatch.setattr(gpu, "WHEELS", tmp_path / ".wheels")


def test_all_parts_together_fit_into_nine_minutes() -> None:
    assert sum(part.seconds for part in gpu.PARTS) <= gpu.BUDGET


@pytest.mark.parametrize("part", SCRIPTED, ids=lambda part: part.name)
def test_a_script_takes_its_arguments(part: gpu.Part, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that it is given, and the record's file."""
    assert part.record is not None
    script: ModuleType = load(Path(part.words[0]).stem)
    words = [*part.words[1:], "--json", str(tmp_path / part.record)]
    monkeypatch.setattr(sys, "argv", [part.words[0], *words])
    if hasattr(script, "_arguments"):
        args = script._arguments(words)
    else:
        args = script.arguments(*([words] if script.arguments.__code__.co_argcount else []))
    assert args.json == tmp_path / part.record


@pytest.mark.parametrize("part", [part for part in gpu.PARTS if part not in SCRIPTED], ids=lambda part: part.name)
def test_a_part_of_tests_names_some(part: gpu.Part) -> None:
    for word in part.words:
        if word.startswith("tests/"):
            assert (SCRIPTS.parent / word).exists(), word


def test_no_part_takes_another_along(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that fails and one that is late are said to; the last still runs."""
    writing = "import sys; open(sys.argv[-1], 'w').write('{}')"
    parts = (
        gpu.Part("bad", ("-c", "print('why'); raise SystemExit(3)"), 30),
        gpu.Part("slow", ("-c", "import time; time.sleep(60)"), 1),
        gpu.Part("good", ("-c", writing), 30, "good.json"),
    )
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "missing", lambda *_: None)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "bad            failed (exit code 3)" in lines[-5]
    assert lines[-4].strip() == "why"
    assert lines[-3].startswith("slow           late")
    assert lines[-1].endswith("good.json")
    assert (tmp_path / "good.json").read_text() == "{}"
    assert gpu.main(["--out", str(tmp_path), "--parts", "good"]) == 0


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
    scripts = [str(SCRIPTS.parent / part.words[0]) for part in SCRIPTED]
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
@pytest.mark.parametrize("script", ["decode_gpu", "samplers", "step_gpu"])
def test_tiny_runs_write_a_record(script: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert load(script).main(["--tiny", "--json", str(path)]) == 0
    record = Record.model_validate_json(path.read_text())
    assert "checks the script, measures nothing" in record.setup
    assert record.rows


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
