"""What a report says of a target with recurrent layers, and that it is so: nothing is run a second time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import make_target
from draftsmith.benchmarks.common.random_models import RECURRENT
from draftsmith.data.prompts import Prompt
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hidden_states import decoder_of
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.evaluate import evaluate
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.report.report import write_report
from draftsmith.eval.report.results import schema
from helpers.models.random_models import random_model, ready

PROMPTS = [[7, 3, 50, 7, 3], [4, 5, 60, 4, 5, 60, 4]]
SAID = "1 of 2 fold the text into a state; a verify call goes node by node there, which c_v counts"


def hybrid() -> Backbone:
    """A short convolution, and a layer that attends."""
    return ready(random_model("lfm2", **RECURRENT["lfm2"]))


def results_of(target: Backbone) -> dict[str, Any]:
    target.tokenizer = train_tokenizer(["abc def ghi jkl\n"] * 5, 300)
    requests = [Request(Prompt(str(n), "all", ("",), chat=False), ids, n) for n, ids in enumerate(PROMPTS)]
    config = EvalConfig(max_new_tokens=12, sweep=[], repeats=1, draft_length=2, temperatures=[0.0])
    return evaluate(target, [Arm("prompt-lookup", PromptLookup(draft_length=2), "lossless")], requests, config)


@pytest.mark.parametrize("is_hybrid", [True, False])
def test_a_line_of_the_report(is_hybrid: bool, tmp_path: Path) -> None:
    results = json.loads(json.dumps(results_of(hybrid() if is_hybrid else make_target("qwen3"))))
    jsonschema.Draft202012Validator(schema()).validate(results)
    assert results["target"].get("recurrent") == ({"layers": 1, "of": 2} if is_hybrid else None)
    assert results["rows"][0]["c_v"] > 0
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "results.json").write_text(json.dumps(results))
    write_report(tmp_path)
    for page in ("report.html", "report.md"):
        text = (tmp_path / page).read_text(encoding="utf-8")
        assert (SAID in text) == is_hybrid, page
        assert ("no accepted token is run again" in text) == is_hybrid, page


def test_no_accepted_token_is_run_again() -> None:
    """A call of the target for each prompt and each step, though drafts are rejected in the middle."""
    target, calls = hybrid(), []
    decoder: Any = decoder_of(target.model)
    decoder.register_forward_pre_hook(lambda *_: calls.append(1))
    done = generate(target, PromptLookup(draft_length=3), PROMPTS, warper=Warper(0.0), max_new_tokens=24)
    origins = {each for row in done.origin for each in row}
    assert {"draft", "correction"} <= origins
    assert len(calls) == len(PROMPTS) + done.target_calls
