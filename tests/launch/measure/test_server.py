"""`eval --server` and `audit --server` from words to files, and what is refused before anything is asked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from conftest import make_drafter
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.tuned_file import write_tuned
from draftsmith.eval.report.results import read_results, schema
from draftsmith.launch.cli import main
from helpers.servers.served_target import Engine, ServedTarget, serving

Captured = pytest.CaptureFixture[str]
SMALL = ["--eval.limit", "4", "--eval.max_new_tokens", "8", "--eval.temperatures", "[0]", "--requests", "6"]
FEW = ["--audit.tokens", "500", "--audit.prompts", "2", "--audit.max_new_tokens", "16", "--audit.batch", "8"]


@pytest.fixture(scope="module")
def own(served: Backbone) -> Iterator[ServedTarget]:
    with serving(Engine(served, make_drafter(served, noise=0.05, draft_length=3))) as server:
        yield server


@pytest.fixture(scope="module")
def base(served: Backbone) -> Iterator[ServedTarget]:
    with serving(Engine(served)) as server:
        yield server


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"text": "the quick brown fox"}, {"prompt": "a lazy dog?"}, {"text": "yes, no"}, {"prompt": "perhaps?"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def tuned(tmp_path: Path, served: Backbone) -> Path:
    """A drafter that was tuned at T = 0 and one prompt at a time."""
    facts = {"temperature": 0.0, "batch": 1, "predicted": 1.57, "speedup": [1.43, 1.34, 1.53], "processor": "a CPU"}
    (tmp_path / "drafter").mkdir()
    write_tuned(tmp_path / "drafter", {"eval.draft_length": "3"}, facts)
    return tmp_path / "drafter"


def at(server: ServedTarget) -> list[str]:
    return ["--server", server.url, "--model", "small"]


def test_eval_audit_report(
    own: ServedTarget,
    base: ServedTarget,
    served_folder: Path,
    prompts: Path,
    tuned: Path,
    tmp_path: Path,
    capfd: Captured,
) -> None:
    """The whole of it: audited, measured beside the baseline and the prediction, reported."""
    out = tmp_path / "out"
    words = [*at(own), "--baseline-server", base.url, "--target", str(served_folder), "--prompts", str(prompts)]
    words += ["--concurrency", "1", "2", "--drafter", str(tuned), "--out", str(out)]
    assert main(["eval", *words, *SMALL, *FEW]) == 0
    printed = capfd.readouterr().out
    assert "verdict: lossless" in printed
    assert "Waiting in ms" in printed
    results = read_results(out / "results.json")
    jsonschema.validate(results, schema())
    assert [row["method"] for row in results["rows"]] == ["small, 1 at a time", "small, 2 at a time"]
    assert [row["predicted_speedup"] for row in results["rows"]] == [1.57, None]
    for row in results["rows"]:
        assert (row["verdict"], row["audited"]) == ("lossless", row["method"])
        assert row["tau"][0] > 1
        assert row["speedup"][0] > 0
        assert row["loop_share"] is not None
    # prompts as our own decoder takes them, and the server's template for the chats
    assert {body["prompt"] for body in base.asked if "prompt" in body} == {"the quick brown fox", "yes, no"}
    audited = json.loads((out / "audit.json").read_text())
    assert audited["verdict"] == "lossless"
    assert {path.name for path in out.iterdir()} == {
        "results.json",
        "audit.json",
        "server-blocks.jsonl",
        "server-answers.jsonl",
    }
    assert main(["report", str(out)]) == 0
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    for found in (page, text):
        assert "At the server" in found
        assert "small, 2 at a time" in found
        assert "1.57 times plain decoding" in found
    # a second measurement is a new one, and goes through
    asked = len(own.asked)
    assert main(["eval", *words, *SMALL, "--no-audit"]) == 0
    assert len(own.asked) - asked == 1 + 6 + 2 + 6 * 2  # warm-up and blocks of both loads
    assert f"--server {own.url}/v1 --model small" in results["repeat"][0]


def test_a_targets_own_sampling_is_said(
    own: ServedTarget, served_folder: Path, prompts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By both commands; what the server is told instead is in every request."""
    target = tmp_path / "target"
    shutil.copytree(served_folder, target)
    settings = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps(settings | {"top_k": 20, "repetition_penalty": 1.05}))
    words = ["--target", str(target), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    asked = len(own.asked)
    assert main(["eval", *at(own), *words, *SMALL, "--no-audit"]) == 0
    said = "has top_k = 20, repetition_penalty = 1.05, which servers fill in"
    notes = read_results(tmp_path / "out" / "results.json")["server"]["notes"]
    assert [note for note in notes if said in note] == notes
    assert all((body["top_k"], body["repetition_penalty"]) == (-1, 1.0) for body in own.asked[asked:])
    with serving(own.engine) as silent:
        silent.refusal = "nothing"
        assert main(["audit", *at(silent), *words, *FEW]) == 4
    assert said in caplog.text


def test_eval_needs_no_target(
    own: ServedTarget, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *at(own), "--prompts", str(prompts), *SMALL]) == 0
    results = read_results(tmp_path / "eval-small" / "results.json")
    (row,) = results["rows"]
    assert (row["verdict"], row["loop_share"]) == ("not audited", None)
    assert any("no --target is named" in note for note in results["server"]["notes"])
    assert main(["report", "eval-small"]) == 0
    assert "has not been audited" in (tmp_path / "eval-small" / "report.md").read_text()


@pytest.mark.slow
def test_audit(
    served: Backbone, own: ServedTarget, served_folder: Path, prompts: Path, tmp_path: Path, capfd: Captured
) -> None:
    """Lossless, not lossless, undecided: three exit codes, and nobody's password on the disk."""
    address = own.url.replace("http://", "http://me:secret@")
    words = ["--model", "small", "--target", str(served_folder), "--prompts", str(prompts), *FEW]
    assert main(["audit", "--server", address, *words, "--out", str(tmp_path / "right")]) == 0
    assert "verdict: lossless" in capfd.readouterr().out
    assert not any("secret" in path.read_text() for path in (tmp_path / "right").iterdir())
    with serving(Engine(served, second_best=5)) as wrong:
        assert main(["audit", "--server", wrong.url, *words, "--out", str(tmp_path / "wrong")]) == 5
    message = capfd.readouterr()
    assert "the audit failed: what the server writes is not the target's own" in message.err
    assert "greedy tokens are not the argmax" in message.out
    assert main(["eval", "--server", own.url, *words, *SMALL, "--out", str(tmp_path / "right")]) == 0
    with serving(Engine(served), ["completions"]) as silent:
        assert main(["audit", "--server", silent.url, *words, "--out", str(tmp_path / "silent")]) == 4
        message = capfd.readouterr()
        assert "the audit is undecided: T = 0 passes, and T > 0 could not be tested" in message.err
        assert "missing: it hands out no token ids" in message.out
        out = ["--out", str(tmp_path / "silent")]
        assert main(["eval", "--server", silent.url, *words, *SMALL, *out]) == 0
        assert (
            "the audit is undecided"
            in json.loads((tmp_path / "silent" / "results.json").read_text())["server"]["notes"][0]
        )
        assert main(["report", str(tmp_path / "silent")]) == 0


def test_a_stopped_eval_does_not_audit_twice(
    served: Backbone, served_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    words = ["--target", str(served_folder), "--prompts", str(prompts), *SMALL, *FEW, "--out", str(tmp_path)]
    with serving(Engine(served)) as server:
        server.fail_after = 1 + 2 + 32 + 3  # one finds out, greedy and sampled answers, warm-up and two blocks
        assert main(["eval", *at(server), *words]) == 2
        asked, server.fail_after = len(server.asked), None
        assert main(["eval", *at(server), *words]) == 0
        assert len(server.asked) - asked == 1 + 1 + 4
    assert {path.name for path in tmp_path.iterdir()} > {"server-answers.jsonl", "server-blocks.jsonl"}


def test_a_server_that_answers_nothing(served_folder: Path, tmp_path: Path, served: Backbone, capfd: Captured) -> None:
    """Requests of every kind are refused: one message, and no traceback."""
    with serving(Engine(served)) as server:
        server.refusal = "no\x1bthing"
        words = ["audit", *at(server), "--target", str(served_folder), *FEW, "--out", str(tmp_path)]
        assert main(words) == 4
    message = capfd.readouterr().err
    assert "answers no request, however it is asked; the last one: status 400: no thing" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval --server {url}", "--server needs --model"),
        ("eval --model small --target t", "--model says something of a --server"),
        ("eval --concurrency 3 --target t", "--concurrency says something of a --server"),
        ("eval --server {url} --model m --method prompt-lookup", "--method says how our own decoder works"),
        ("eval --server {url} --model m --samples 2", "--samples says how our own decoder works"),
        ("eval --server {url} --model m --concurrency 0", "--concurrency is 0"),
        ("eval --server {url} --model m --rate 0", "--rate is 0"),
        ("eval --server {url} --model m --requests 0", "--requests is 0"),
        ("eval --server {url} --model m --timeout 0", "--timeout is 0"),
        ("eval --server nowhere --model m", "'nowhere' is no URL"),
        ("eval --server {url} --baseline-server nowhere --model m", "'nowhere' is no URL"),
        ("eval --server {url} --model m --eval.draft_length 3", "--eval.draft_length has no say at a server"),
        ("eval --server {url} --model m --drafter.policy argmax", "--drafter.policy has no say at a server"),
        ("eval --server {url} --model m --eval.prompt_tokens 9", "takes the target's tokenizer"),
        ("eval --server {url} --model m --drafter nothing", "holds no prediction"),
        ("audit --server {url} --model m", "an audit compares with the target"),
        ("audit --server {url} --model m --target t --plant fresh-draw", "--plant says how our own decoder works"),
        ("audit --server {url} --model m --target t --audit.top_k 3 --audit.top_p 0.5", "in different orders"),
        ("audit --concurrency 3 --target t", "--concurrency says something of a --server"),
    ],
)
def test_refusals(
    words: str, message: str, own: ServedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.format(url=own.url).split()) == 2
    assert message in " ".join(capfd.readouterr().err.split())
    assert not [*tmp_path.iterdir()]


def test_a_refusal_costs_no_import_of_torch() -> None:
    code = (
        "import sys; from draftsmith.launch.cli import main; "
        "assert main(['eval', '--server', 'nowhere', '--model', 'm']) == 2; "
        "assert main(['eval', '--help']) == 0; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
