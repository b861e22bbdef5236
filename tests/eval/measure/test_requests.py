"""Which turns of chats are decoded: whole ones that fit, in the evaluation and in the audit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from draftsmith.data.prompts import Prompt, render
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import load_tokenizer
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.errors import RequestError
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.evaluate import evaluate
from draftsmith.eval.measure.requests import first_turns, make_requests
from draftsmith.launch.measure.run import left_out, prompts_of
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model

TURNS = ("why", "and then", "no")
PROMPTS = [
    Prompt("talk", "all", TURNS, chat=True),
    Prompt("long", "all", ("the quick brown fox " * 40, "no"), chat=True),
    Prompt("text", "all", ("a lazy dog answers " * 40,), chat=False),
]


@pytest.fixture(scope="module")
def talker(chat_tokenizer_folder: Path) -> Backbone:
    """A random target with a chat template."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(chat_tokenizer_folder))
    sizes = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=2, head_size=16, intermediate=32, max_positions=512)
    model = fresh_model(sizes, vocabulary=len(tokenizer), eos=None).eval()
    talker = Backbone(model, name="talker")
    talker.tokenizer = tokenizer
    return talker


def test_no_chat_loses_its_beginning(talker: Backbone) -> None:
    """A turn that is too long ends its chat; the text keeps its end."""
    first = render(PROMPTS[0], talker.tokenizer)
    config = EvalConfig(max_new_tokens=4, prompt_tokens=500)
    whole = make_requests(talker, PROMPTS, config)
    assert [each.prompt.id for each in whole] == ["talk"] * 3 + ["long"] * 2 + ["text"]
    assert all(each.ids[: len(first)] == first for each in whole[:3])
    most = len(whole[2].ids) - 1  # of the third turn
    result = make_requests(talker, PROMPTS, config.model_copy(update={"prompt_tokens": most}))
    assert [each.ids for each in result] == [*(each.ids for each in whole[:2]), whole[5].ids[-most:]]
    with pytest.raises(RequestError, match="all 2 prompts are longer than eval.prompt_tokens = 5"):
        make_requests(talker, PROMPTS[:2], EvalConfig(prompt_tokens=5))


def test_what_is_left_out_is_counted(talker: Backbone, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = EvalConfig(
        max_new_tokens=12,
        prompt_tokens=60,
        temperatures=[0.0],
        sweep=[],
        repeats=1,
        prompts=str(tmp_path / "prompts.jsonl"),
    )
    lines = '{"prompt": "why"}\n{"prompt": "' + "why " * 90 + '"}\n'
    Path(config.prompts).write_text(lines)
    with caplog.at_level(logging.WARNING):
        prompts = prompts_of(config)
        requests = make_requests(talker, prompts, config)
    assert caplog.text.count("1 of 2 prompts are left out") == 1
    assert first_turns(requests) == [render(prompts[0], talker.tokenizer)]
    arms = [Arm("lookup", PromptLookup())]
    results = evaluate(talker, arms, requests, config, left_out=left_out(prompts, requests))
    assert results["left_out"] == 1
    assert results["rows"][0]["requests"] == 1
