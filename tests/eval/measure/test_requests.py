"""Which turns of chats are decoded: whole ones that fit, in the evaluation and in the audit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.prompts import Prompt, render
from draftsmith.data.rows.chats.spoken import ids_of
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import load_tokenizer
from draftsmith.decoding.engine import Generation
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.steps import StepLog
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.errors import RequestError
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure import requests
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
        made = make_requests(talker, prompts, config)
    assert caplog.text.count("1 of 2 prompts are left out") == 1
    assert first_turns(made) == [render(prompts[0], talker.tokenizer)]
    arms = [Arm("lookup", PromptLookup())]
    results = evaluate(talker, arms, made, config, left_out=left_out(prompts, made))
    assert results["left_out"] == 1
    assert results["rows"][0]["requests"] == 1


@pytest.mark.parametrize(
    ("chat", "behind"),
    [(True, "<|endoftext|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"), (False, "{}")],
)
def test_a_later_turn_stands_behind_the_ids_that_were_written(
    talker: Backbone, chat: bool, behind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special ones among them, and letters that a tokenizer would put together, up to their end; each answer is the
    greedy one to the prompt in front of it."""
    tokenizer, asked = talker.tokenizer, list[list[int]]()
    body = tokenizer.convert_tokens_to_ids(["t", "h", "e", "<|im_start|>", "f"])
    assert len(ids_of(tokenizer, "the")) == 1

    def written(_target: Backbone, prompts: list[list[int]], *, warper: Warper, **_how: Any) -> Generation:
        assert warper == Warper(0.0)
        asked.extend(prompts)
        return Generation([[*body, tokenizer.eos_token_id]], [[]], StepLog(1, 1, 9))

    monkeypatch.setattr(type(talker), "eos_ids", property(lambda _self: (tokenizer.eos_token_id,)))
    monkeypatch.setattr(requests, "autoregressive", written)
    prompt = Prompt("talk", "all", TURNS, chat=chat)
    first, second, third = (each.ids for each in make_requests(talker, [prompt], EvalConfig(prompt_tokens=500)))
    assert second == [*first, *body, *ids_of(tokenizer, behind.format("and then"))]
    assert third == [*second, *body, *ids_of(tokenizer, behind.format("no"))]
    assert asked == [first, second]
