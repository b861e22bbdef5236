"""Where tuning found that plain decoding is the setting, every command says so, and says what it does."""

from __future__ import annotations

import io
import json
from pathlib import Path

import jsonschema
import pytest
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.heads.medusa import MedusaHeads
from draftsmith.drafters.tuned_file import write_tuned
from draftsmith.eval.measure.environment import drafter_hash
from draftsmith.eval.report.report import write_report
from draftsmith.eval.report.results import schema
from draftsmith.launch.check.early import check_audit, named
from draftsmith.launch.cli import main
from draftsmith.launch.measure.loaded import say_tuned
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.requests import AuditRequest, Pair
from draftsmith.trainers.teacher.frozen import saver
from helpers.models.shallow_target import SHALLOW
from rich.console import Console

FACTS = {
    "pays": False,
    "plain": True,
    "temperature": 0.0,
    "batch": 8,
    "processor": "here",
    "pays_from": 1.52,
    "target_call_seconds": 0.01,
}
FOUND = (
    "tuning found nothing faster than plain decoding for T = 0.0, batch 8, here "
    "(it would pay from a target call of 15.2 ms, 1.52 times the one measured); "
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of untrained heads that were tuned, and pay nowhere."""
    target = load_target(SHALLOW)
    saver(target, "medusa")(MedusaHeads.for_target(target.model, heads=4, shared_head=True), tmp_path / "run/drafter")
    recipe = load_recipe("medusa-tiny", [("data.limit_rows", "200"), ("target.path", SHALLOW)])
    (tmp_path / "run" / "run.yaml").write_text(recipe.yaml())
    write_tuned(tmp_path / "run" / "drafter", {}, FACTS)
    return tmp_path / "run"


def test_chat_decodes_plainly_unless_a_flag_drafts(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same text either way, as it is lossless; only one of them has a drafter."""
    chat = ["chat", str(run), "--prompt", "import os\n", "--max-new-tokens", "12"]
    assert main(chat) == 0
    plain = capfd.readouterr().out
    assert plain.startswith(f"{FOUND}nothing is drafted; a flag for drafter.* or eval.draft_length drafts")
    assert "with the drafter" not in plain
    assert "[12 tokens, " in plain
    for flag in ("--eval.draft_length=2", "--drafter.tree=chain"):
        assert main([*chat, flag]) == 0
        drafted = capfd.readouterr().out
        assert "tuning found" not in drafted
        assert "with the drafter" in drafted
        text = plain.split("\n", 1)[1].rpartition("\n[")[0]
        assert drafted.rpartition("\n[")[0] == text


def test_eval_measures_the_drafter_as_the_recipe_has_it(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    few = "--no-audit --eval.limit 1 --eval.max_new_tokens 12 --eval.repeats 1 --eval.sweep [] --eval.temperatures [0]"
    assert main(["eval", str(run), *few.split()]) == 0
    assert f"{FOUND}what is measured here drafts all the same, as the recipe has it" in capfd.readouterr().out
    results = json.loads((run / "eval" / "results.json").read_text())
    assert results["rows"][0]["nodes"] == 20  # medusa.nodes of the recipe
    jsonschema.Draft202012Validator(schema()).validate(results)
    fingerprint = results["target"]["sha256"]
    assert fingerprint == drafter_hash(Path(SHALLOW))
    write_report(run)
    for page in ("report.html", "report.md"):
        assert f"sha256 {fingerprint}" in (run / page).read_text()


def test_the_audit_says_the_same(run: Path) -> None:
    pair = check_audit(AuditRequest(run), [])
    assert pair is not None
    out = io.StringIO()
    say_tuned(pair, Console(file=out))
    assert FOUND in out.getvalue()


def test_export_writes_the_drafter_and_says_so(
    run: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run)]) == 0
    assert f"{FOUND}it is written as the recipe has it" in caplog.text
    assert '"num_speculative_tokens": 4' in capfd.readouterr().out
    assert (run / "vllm" / "model.safetensors").is_file()


def test_it_is_said_of_the_drafter_by_itself(run: Path) -> None:
    """Another method that needs the drafter was not tuned; beside others the drafter is measured."""
    assert named(Pair(run), [], tuned=True).plain
    assert not named(Pair(run, method="trained,prompt-lookup"), [], tuned=True).plain
    assert not named(Pair(run), [("eval.draft_length", "3")], tuned=True).plain
