"""Tags that only some families have, ends that are the next turn's beginning, and answers as turns of the next prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.config import DataConfig
from draftsmith.data.prompts import load_prompts, render
from draftsmith.data.rows.chats.spoken import message_of
from draftsmith.data.rows.encode import Encoded, Encoder
from draftsmith.data.rows.raw import BadRow
from draftsmith.data.rows.shapes import parse
from draftsmith.data.rows.templates import render_chat
from helpers.models.chat_templates import KINDS, say
from transformers import PreTrainedTokenizerFast

WHY, AND = say("user", "why"), say("user", "and")
TWO = [WHY, say("assistant", "the dog"), AND, say("assistant", "a fox")]
WRAPPED = KINDS["Command R"].template
HEADERS = """
{%- for m in messages -%}
{{- '<|' + m.role + '|>\n' -}}
{%- if m.role == 'assistant' and loop.last and m.reasoning_content -%}{{- '<think>' + m.reasoning_content + '</think>\n' -}}{%- endif -%}
{{- m.content -}}{%- if m.tool_calls -%}{{- '<call>' + m.tool_calls[0].function.name + '</call>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"""
KIMI = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}{{- '<think>' + (m.reasoning_content or '') + '</think>' -}}{%- endif -%}
{{- m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""


def tokenizer_of(template: str, *, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    tokenizer = KINDS["Qwen3, thinking"].tokenizer()
    tokenizer.chat_template = template
    tokenizer.eos_token = end
    return tokenizer


def learnt(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **values: Any) -> tuple[list[str], Any]:
    """What is in the loss, answer by answer, and the notes."""
    encoder = Encoder.of(tokenizer, DataConfig(template_values=values or None))
    (found,) = encoder([parse({"messages": messages}, "messages")])
    assert not isinstance(found, BadRow), found
    return answers_of(tokenizer, found), dict(found.notes)


def answers_of(tokenizer: PreTrainedTokenizerFast, found: Encoded) -> list[str]:
    parts = []
    for document in found.documents:
        runs, inside = [""], False
        for token, counts in zip(document.ids.tolist(), document.in_loss.tolist(), strict=True):
            if counts and not inside:
                runs.append("")
            inside = counts
            runs[-1] += tokenizer.decode([token]) if counts else ""
        parts += runs[1:]
    return parts


# ---- Gemma 4's channels -------------------------------------------------------------------------


def test_a_channel_of_thoughts_may_be_closed_by_the_prompt() -> None:
    gemma = tokenizer_of(KINDS["Gemma 4"].template, end="<turn|>")
    assert learnt(gemma, TWO) == (["the dog<turn|>", "a fox<turn|>"], {})
    thoughtful = [WHY, say("assistant", "the dog", reasoning_content="so")]
    assert learnt(gemma, thoughtful) == (["the dog<turn|>"], {"thoughts": 1})
    written = "<|channel>thought\nso\n<channel|>the dog<turn|>"
    assert learnt(gemma, thoughtful, thinking=True) == ([written], {})


# ---- ends ---------------------------------------------------------------------------------------


def test_what_begins_the_next_turn_may_be_the_end_of_an_answer() -> None:
    glm = tokenizer_of(HEADERS, end="<|user|>")
    assert learnt(glm, TWO)[0] == ["the dog<|user|>", "a fox<|user|>"]
    thoughtful = [WHY, say("assistant", "the dog", reasoning_content="so"), AND, say("assistant", "a fox")]
    assert learnt(glm, thoughtful)[0] == ["<think>so</think>\nthe dog<|user|>", "a fox<|user|>"]
    cut = [WHY, say("assistant", "the dog", ended=False)]
    assert learnt(glm, cut) == (["the dog"], {"cut": 1})


@pytest.mark.parametrize(
    ("end", "written"), [("<|tool|>", "<call>look</call><|tool|>"), ("<|user|>", "<call>look</call>")]
)
def test_the_end_of_a_call_is_what_begins_its_result(end: str, written: str) -> None:
    """Behind the last turn nobody can tell what would have followed."""
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    called = [WHY, say("assistant", "", tool_calls=[call])]
    tokenizer = tokenizer_of(HEADERS, end=end)
    assert learnt(tokenizer, [*called, say("tool", "here")])[0] == [written]
    assert learnt(tokenizer, called)[0] == ["<call>look</call>"]


def test_an_empty_pair_that_no_row_asks_for_is_counted() -> None:
    found, notes = learnt(KINDS["Qwen3, thinking"].tokenizer(), [WHY, say("assistant", "the dog")])
    assert found == ["<think>\n\n</think>\n\nthe dog<|im_end|>"]
    assert notes == {"hollow": 1}


# ---- answers as turns of the next prompt --------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (WRAPPED, "<|START_THINKING|>so<|END_THINKING|><|START_RESPONSE|>the dog<|END_RESPONSE|>"),
        (WRAPPED, "<|START_RESPONSE|>the dog<|END_RESPONSE|>"),
        (WRAPPED, "<|START_RESPONSE|>the dog"),  # cut off
        (KIMI, "<think>so</think>the dog"),
        (KIMI, "<think></think>the dog"),
    ],
)
def test_a_template_writes_an_answer_again_as_it_was(template: str, text: str) -> None:
    tokenizer = tokenizer_of(template)
    turn = message_of(tokenizer, text, "")
    assert turn["content"] == "the dog"
    asked = render_chat(tokenizer, [WHY], answer_next=True)
    again = render_chat(tokenizer, [WHY, turn, AND], answer_next=True)
    assert again.startswith(asked + text)


def test_an_answer_that_no_template_gives_back_stays_whole() -> None:
    tokenizer = tokenizer_of(WRAPPED)
    for text in ("the dog<|END_RESPONSE|>", "<|START_THINKING|>so", "the dog"):
        assert message_of(tokenizer, text, "")["content"] == text
    refusing = tokenizer_of("{{- raise_exception('no') -}}")
    assert message_of(refusing, "the dog", "")["content"] == "the dog"


def test_a_name_of_a_user_reaches_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [say("user", "why", name="Ada")]}) + "\n")
    named = KIMI.replace("m.role + '\n'", "m.role + (m.name or '') + '\n'")
    tokenizer = tokenizer_of(named)
    (prompt,) = load_prompts(str(path))
    assert "userAda\nwhy" in tokenizer.decode(render(prompt, tokenizer))
