"""A finished quickstart, and the log of a fresh clone, as records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from draftsmith.benchmarks.common.markdown import lines_of
from draftsmith.benchmarks.common.records import read_record
from draftsmith.launch.quickstart import HALF, RECIPE, TRAINING, TRAINING_FREE
from draftsmith.launch.recipe.load import load_recipe
from helpers.benchmark_scripts import MACHINE, load

LOG = """make quickstart: passed in 640 s with its set-up, largest process 1.9 GB; log: somewhere
make test: FAILED in 812 s with its set-up, largest process 2.4 GB; log: somewhere
"""


def row(method: str, temperature: float, **more: Any) -> dict[str, Any]:
    return {
        "method": method,
        "requests": 24,
        "temperature": temperature,
        "tau": [1.5, 1.4, 1.6],
        "alpha": [0.4, 0.3, 0.5],
        "speedup": [0.9, None, None],
        "predicted_speedup": 0.8,
        "loop_share": 0.3 if temperature == 0 else 0.6,
        "verdict": "lossless",
        "audited": method,
        **more,
    }


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """What a quickstart leaves, as far as the record reads it."""
    folder = tmp_path / "run" / "eval"
    folder.mkdir(parents=True)
    methods = ("eagle", "prompt-lookup")
    results = {
        "rows": [
            *(row(name, at) for at in (0.0, 1.0) for name in methods),
            row("untrained eagle", 0.0, audited="eagle"),
        ],
        "second": [
            {
                "method": "eagle",
                "temperature": 1.0,
                "tau": [1.6, 1.5, 1.7],
                "first_tau": [1.5, 1.4, 1.6],
                "agrees": True,
                "requests": 24,
                "prompts": "stdlib-second",
            }
        ],
        "sweep": [{"draft_length": k, "predicted_speedup": 1 / k, "speedup": [k, k, k]} for k in (1, 2, 4)],
        "settings": {"limit": 24, "max_new_tokens": 64, "draft_length": 4},
        "environment": MACHINE,
    }
    (folder / "results.json").write_text(json.dumps(results))
    audit = {"rosenblatt": {"detectable": 0.07}, "enumeration": {"detectable": 0.01}}
    (folder / "audit.json").write_text(json.dumps(audit))
    (folder / "tune.json").write_text(json.dumps({"sentence": "EAGLE-1, draft_length 2: 1.5 times plain decoding"}))
    (tmp_path / TRAINING_FREE).mkdir()
    (tmp_path / TRAINING_FREE / "tune.json").write_text(json.dumps({"sentence": "prompt-lookup pays"}))
    resolved = load_recipe(RECIPE, list((TRAINING | HALF).items()))
    (tmp_path / "run" / "run.yaml").write_text(resolved.yaml())
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    (tmp_path / "run" / "drafter" / "config.json").write_text("run")
    (tmp_path / "run" / "report.html").write_text("<p>pays</p>")
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    module = load("quickstart_results")
    monkeypatch.setattr(sys, "argv", ["quickstart_results.py", *words])
    module.main()


def test_another_processor_has_a_record_of_its_own(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(monkeypatch, str(finished), "--on", "avx512", "--results", str(tmp_path / "results"))
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["quickstart-avx512.json"]


def test_a_finished_quickstart_becomes_the_readmes_table(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(monkeypatch, str(finished), "--seconds", "600", "--results", str(tmp_path / "results"))
    record = read_record(tmp_path / "results" / "quickstart.json")
    assert record.origin == "measured"
    assert (tmp_path / "results" / "quickstart-report.html").read_text() == "<p>pays</p>"
    assert record.seeds == 1
    assert [each.name for each in record.drafters] == ["eagle-tiny"]
    assert record.audit is not None
    assert "0.0700" in record.audit.sees
    assert f"eagle-tiny ({TRAINING['loop.steps']} steps in bf16)" in record.setup
    lines = lines_of(record.tables["quickstart"], record)
    assert lines[2] == "| EAGLE-1 | 0 | 1.50 [1.40, 1.60] | 0.40 [0.30, 0.50] | 0.90 | 0.80 | 30% | lossless |"
    assert lines[-1].startswith("| untrained EAGLE-1 |")
    assert lines[-1].endswith("| as EAGLE-1 |"), "nobody audited it"
    assert record.notes == [
        "The command took 600 s.",
        "On 24 other prompts (stdlib-second) tau agrees with the first set's in every row, within the interval of the "
        "difference: EAGLE-1 at T = 1 1.60 (first set 1.50).",
        "The target's greedy text has 30% of its tokens in loops (a row is flagged at 50 %).",
        "Best draft length of the sweep: 1 predicted, 4 measured.",
        "Tuned on other prompts: EAGLE-1, draft_length 2: 1.5 times plain decoding; prompt-lookup pays.",
    ]


def test_the_log_of_a_fresh_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_text(LOG)
    call(monkeypatch, "--newcomer", str(tmp_path / "log"), "--results", str(tmp_path))
    record = read_record(tmp_path / "newcomer.json")
    assert lines_of(record.tables["newcomer"], record)[2:] == [
        "| make quickstart | passed | 640 s | 1.9 GB |",
        "| make test | FAILED | 812 s | 2.4 GB |",
    ]
    assert record.notes == []
    (tmp_path / "quickstart.log").write_text(
        "1/6 a look ...\n2/6 training, an\nEAGLE-1 drafter ... (33 s so\nfar)\n3/6 x (9 s so far)\n"
    )
    (tmp_path / "log").write_text(LOG.replace("log: somewhere", f"log: {tmp_path / 'quickstart.log'}"))
    call(monkeypatch, "--newcomer", str(tmp_path / "log"), "--results", str(tmp_path))
    (note,) = read_record(tmp_path / "newcomer.json").notes
    assert "came 33 s after `make quickstart` had installed" in note
    assert str(tmp_path) not in (tmp_path / "newcomer.json").read_text()
    (tmp_path / "log").write_text("nothing\n")
    with pytest.raises(SystemExit, match="no line"):
        call(monkeypatch, "--newcomer", str(tmp_path / "log"), "--results", str(tmp_path))
