"""`eval --server`, `audit --server` and `features.source: engine` at vLLM's own server, as the README has them."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.eval.report.results import read_results
from draftsmith.launch.cli import main
from engines.cases import Trained
from engines.conftest import CHARACTERS, MODULES
from engines.engine import NEEDED
from engines.exported import exported
from engines.findings import FAULTY, SERVER, Findings, figure
from engines.serving import NAME, serving

pytestmark = NEEDED
AUDIT = ("--audit.max_new_tokens", "48", "--audit.tokens", "8000", "--audit.batch", "16")
FEW = ("--eval.max_new_tokens", "48", "--eval.temperatures", "[0, 1]", "--requests", "16")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompts as a user's file has them."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    sources = [inspect.getsource(import_module(name))[:CHARACTERS] for name in MODULES]
    path.write_text("\n".join(json.dumps({"text": source}) for source in sources))
    return path


def audited(url: str, texts: Path, out: Path) -> dict[str, Any]:
    """What `draftsmith audit --server` found; its exit code has to say the same."""
    words = ["--server", url, "--model", NAME, "--target", "tiny", "--prompts", str(texts), "--out", str(out)]
    code = main(["audit", *words, *AUDIT])
    found: dict[str, Any] = json.loads((out / "audit.json").read_text())
    assert code == {"lossless": 0, "NOT lossless": 5, "undecided": 4}[found["verdict"]]
    return found


def add(findings: Findings, drafter: str, found: dict[str, Any], **cells: Any) -> None:
    """A server's row."""
    replayed = found["replay"]
    findings.add(
        SERVER,
        drafter,
        verdict=found["verdict"],
        greedy=f"{replayed['bugs']} of {replayed['tokens']:,}",
        nats=figure(found["nats"]),
        expected=figure(found["expected_nats"]),
        **cells,
    )


def test_plain_decoding_is_lossless(target: Backbone, texts: Path, findings: Findings, tmp_path: Path) -> None:
    with serving(tmp_path / "server", target.name) as url:
        found = audited(url, texts, tmp_path / "audit")
    add(findings, "none", found)
    assert found["verdict"] == "lossless"


@pytest.mark.parametrize(("title", "run"), [("draft model", "distill"), ("EAGLE-3", "eagle3")])
def test_a_drafter_of_ours_is_lossless_there(
    title: str, run: str, target: Backbone, texts: Path, trained: Trained, findings: Findings, tmp_path: Path
) -> None:
    """And measured beside the same server without it."""
    command = exported(trained(run), "vllm", tmp_path / "export")
    assert command.samples
    with (
        serving(tmp_path / "drafted", command.model, command.config) as url,
        serving(tmp_path / "plain", target.name) as plain,
    ):
        found = audited(url, texts, tmp_path / "out")
        words = ["--server", url, "--baseline-server", plain, "--model", NAME, "--target", "tiny"]
        words += ["--prompts", str(texts), "--out", str(tmp_path / "out"), "--no-audit"]
        assert main(["eval", *words, *FEW]) == 0
    rows = {row["temperature"]: row for row in read_results(tmp_path / "out" / "results.json")["rows"]}
    taus = {f"tau_{at:g}": figure(row["tau"][0], tuple(row["tau"][1:])) for at, row in rows.items()}
    speeds = {f"speedup_{at:g}": figure(row["speedup"][0], tuple(row["speedup"][1:])) for at, row in rows.items()}
    add(findings, title, found, measured="yes", **taus, **speeds)
    assert found["verdict"] == "lossless"
    assert all(row["tau"][0] > 1 for row in rows.values())


def test_the_faulty_build_is_caught(texts: Path, trained: Trained, findings: Findings, tmp_path: Path) -> None:
    """The CPU build as it comes: above T = 0 what it writes behind a drafter is not the target's text."""
    command = exported(trained("distill"), "vllm", tmp_path / "export")
    with serving(tmp_path / "server", command.model, command.config, more=()) as url:
        found = audited(url, texts, tmp_path / "audit")
    add(findings, FAULTY, found)
    assert found["verdict"] == "NOT lossless"
    assert found["replay"]["bugs"] == 0  # T = 0 does without the faulty part
