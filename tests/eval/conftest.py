"""A run folder with real results of tiny random models, and texts that try to break out of a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import make_drafter, make_target
from draftsmith.data.prompts import Prompt
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.drafters.config import DrafterConfig
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.config import AuditConfig, EvalConfig
from draftsmith.eval.measure import speed
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.evaluate import evaluate
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.measure.second import second_rows
from draftsmith.storage.identity import flat
from helpers.browser import CHROMIUM, QUIET

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = "</pre></style><script>document.title='broken'</script>\u202e\u0000'\"```|\U0001f40d<b>"


@pytest.fixture(scope="session")
def measured() -> tuple[dict[str, Any], dict[str, Any]]:
    """`results.json` and `audit.json` of a real evaluation and a real (small) audit."""
    target = make_target("qwen3")
    tokenizer = train_tokenizer(["abc def ghi jkl\n"] * 5, 300)
    # the random models know 61 tokens; the tokenizer's first 61 stand for them
    target.tokenizer = tokenizer
    drafter = make_drafter(target)
    prompts = [Prompt(str(n), "even" if n % 2 else "odd", ("",), chat=False) for n in range(4)]
    ids = [[5 + n, 7, 11] for n in range(4)]
    config = EvalConfig(
        max_new_tokens=12,
        sweep=[1, 2],
        sweep_prompts=2,
        repeats=1,
        draft_length=2,
        limit=None,
        second_prompts="others.jsonl",
    )
    report = audit(target, drafter, ids, AuditConfig(tokens=500, sequences=20_000, prompts=2))
    arm = Arm("draft model", drafter, report.verdict, path="runs/a_b/drafter", sha256="0f" * 32)
    requests = [Request(prompt, ids[number], number) for number, prompt in enumerate(prompts)]
    results = evaluate(target, [arm], requests, config)
    others = [Request(prompt, [*ids[number], 13], number) for number, prompt in enumerate(prompts)]
    results["second"] = second_rows(target, [arm], others, config, results["rows"])
    # what the command line adds
    results["draft"]["settings"] = flat(DrafterConfig(policy="argmax").model_dump(mode="json"))
    results["repeat"] = [
        "draftsmith train runs/a_b/run.yaml --out runs/a_b",
        "draftsmith eval runs/a_b --drafter.policy=argmax '--eval.sweep=[1, 2]'",
    ]
    return json.loads(json.dumps(results)), json.loads(json.dumps(report.to_dict()))


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations whose figures no test looks at time their calls twice, not thirty times."""
    monkeypatch.setitem(speed._ROUNDS, "rounds", 2)
    monkeypatch.setitem(speed._ROUNDS, "at_least", 1)


@pytest.fixture
def run_folder(measured: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> Path:
    results, audited = measured
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "results.json").write_text(json.dumps(results))
    (tmp_path / "eval" / "audit.json").write_text(json.dumps(audited))
    records = [{"kind": "train", "step": n, "loss": 3 - n / 10} for n in range(10)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    return tmp_path


@pytest.fixture
def hostile_run(run_folder: Path) -> Path:
    """The same run with hostile text wherever text comes from outside."""
    path = run_folder / "eval" / "results.json"
    results = json.loads(path.read_text())
    results["target"]["name"] = HOSTILE
    for row in results["rows"]:
        row["method"] = HOSTILE
        for sample in row["sample"]:
            sample["id"] = sample["prompt"] = HOSTILE
            sample["tokens"].append([HOSTILE, "draft"])
    path.write_text(json.dumps(results))
    return run_folder


@pytest.fixture(scope="module")  # it runs an event loop, which no test of another file may meet
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is in the extra `dev`")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()
