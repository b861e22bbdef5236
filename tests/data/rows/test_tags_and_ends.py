"""Tags that only some families have, ends that are the next turn's beginning, and answers as turns of the next prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.config import DataConfig, RowShape
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
    return learnt_of(tokenizer, {"messages": messages}, "messages", **values)


def learnt_of(
    tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], shape: RowShape, **values: Any
) -> tuple[list[str], Any]:
    """The same of a row of any shape."""
    encoder = Encoder.of(tokenizer, DataConfig(template_values=values or None))
    (found,) = encoder([parse(row, shape)])
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


def test_other_tags_than_the_templates_are_words() -> None:
    """Such as rows for reinforcement learning have."""
    words = "<reasoning>so</reasoning><answer>the dog</answer>"
    found, _ = learnt(KINDS["Qwen3, thinking"].tokenizer(), [WHY, say("assistant", words)])
    assert found == [f"<think>\n\n</think>\n\n{words}<|im_end|>"]
    quiet, notes = learnt(
        KINDS["Qwen3, `enable_thinking: false`"].tokenizer(), [WHY, say("assistant", words)], enable_thinking=False
    )
    assert (quiet, notes) == ([f"{words}<|im_end|>"], {})


# ---- answers as turns of the next prompt --------------------------------------------------------


AFTER = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}
{%- if loop.last and m.reasoning_content -%}{{- '<think>' + m.reasoning_content + '</think>' -}}
{%- else -%}{{- OTHERWISE -}}{%- endif -%}
{%- endif -%}
{{- m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' + PROMPT -}}{%- endif -%}"""


def after(otherwise: str, prompt: str = "") -> str:
    """Thoughts leave the history; what stands there instead, and how prompts end."""
    return AFTER.replace("OTHERWISE", repr(otherwise)).replace("PROMPT", repr(prompt))


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


@pytest.mark.parametrize(
    ("template", "prompt", "text"),
    [
        (after("<think></think>"), "", "<think>so</think>the dog"),
        (after("</think>", "<think>"), "<think>", "so</think>the dog"),
        (after("</think>", "<think>"), "<think>", "</think>the dog"),
    ],
)
def test_tags_that_the_history_has_of_its_own_are_not_doubled(template: str, prompt: str, text: str) -> None:
    tokenizer = tokenizer_of(template)
    turn = message_of(tokenizer, text, prompt)
    assert turn["content"] == "the dog"
    again = render_chat(tokenizer, [WHY, turn, AND], answer_next=True)
    assert again.count("</think>") == 1


def test_a_prompt_that_closes_thoughts_has_the_tags_of_the_turn() -> None:
    """By the template's own variable, without which it closes none."""
    closing = WRAPPED.replace(
        "{{- '<|START_RESPONSE|>'", "{%- if quiet -%}{{- '<think></think>' -}}{%- endif -%}{{- '<|START_RESPONSE|>'"
    ).replace(
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}",
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' + ('<think></think>' if quiet else '') -}}",
    )
    tokenizer, quiet = tokenizer_of(closing), {"quiet": True}
    asked = render_chat(tokenizer, [WHY], answer_next=True, values=quiet)
    assert asked.endswith("<think></think>")
    text = "<|START_RESPONSE|>the dog<|END_RESPONSE|>"
    turn = message_of(tokenizer, text, asked, values=quiet)
    assert turn["content"] == "the dog"
    assert render_chat(tokenizer, [WHY, turn, AND], answer_next=True, values=quiet).startswith(asked + text)


# ---- what only whole families of rows or templates have -----------------------------------------


def test_answers_of_a_prompt_are_not_learnt() -> None:
    """Of a prompt and a completion that are both messages, as TRL's rows."""
    plain = tokenizer_of(after(""))
    row = {"prompt": [WHY, say("assistant", "the dog"), AND], "completion": [say("assistant", "a fox")]}
    assert learnt_of(plain, row, "prompt_completion") == (["a fox<|im_end|>"], {})
    assert learnt_of(plain, row | {"ended": False}, "prompt_completion") == (["a fox"], {"cut": 1})
    called = {"prompt": [WHY], "completion": [say("assistant", "the dog"), AND, say("assistant", "a fox")]}
    assert learnt_of(plain, called, "prompt_completion")[0] == ["the dog<|im_end|>", "a fox<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen3, thinking", "<think>\nso the"),
        ("Qwen3, `enable_thinking: false`", None),
        ("DeepSeek R1 and what is distilled from it", "so the"),
    ],
)
def test_thoughts_that_are_never_closed_are_cut(name: str, found: str | None) -> None:
    """Whatever the row says of it, unless it says that the answer did end."""
    kind = KINDS[name]
    messages = [WHY, say("assistant", "<think>\nso the"), AND, say("assistant", "a fox")]
    answers, notes = learnt(kind.tokenizer(), messages, **(kind.values or {}))
    assert answers[:-1] == ([] if found is None else [found])
    assert notes["cut"] == 1
    ended = [WHY, say("assistant", "<think>\nso the", ended=True)]
    assert learnt(tokenizer_of(after("")), ended) == (["<think>\nso the<|im_end|>"], {})


def test_a_prompt_of_which_only_the_last_turn_tells_the_end() -> None:
    """As Mistral's of which the system text stands in the last turn of a user, where that is the last of all."""
    moved = """
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '[INST]' + (messages[0].content if loop.last and messages[0].role == 'system' else '') + m.content + '[/INST]' -}}
{%- elif m.role == 'assistant' -%}{{- m.content + '<|im_end|>' -}}{%- endif -%}
{%- endfor -%}"""
    messages = [say("system", "briefly "), *TWO]
    assert learnt(tokenizer_of(moved), messages) == (["the dog<|im_end|>", "a fox<|im_end|>"], {})


def test_a_pair_that_the_row_itself_has_is_not_the_templates() -> None:
    assert learnt(tokenizer_of(after("")), [WHY, say("assistant", "<think>\n\n</think>\n\nthe dog")]) == (
        ["<think>\n\n</think>\n\nthe dog<|im_end|>"],
        {},
    )


CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


@pytest.mark.parametrize(
    "turn",
    [
        say("assistant", "the dog"),
        say("assistant", "end"),
        say("assistant", "im"),
        say("assistant", "so", tool_calls=[CALL]),
    ],
)
def test_nothing_behind_the_first_end_is_learnt(turn: dict[str, Any]) -> None:
    """Be it of a turn that calls, or of words that stand in the end's own name."""
    tail = after("").replace(
        "{%- endfor -%}", "{%- endfor -%}{%- if not add_generation_prompt -%}<|endoftext|><|im_end|>{%- endif -%}", 1
    )
    (found,), _ = learnt(tokenizer_of(tail), [WHY, turn])
    assert found == turn["content"] + "<|im_end|>"


def test_a_result_of_a_tool_is_not_learnt_for_want_of_a_header() -> None:
    """Apertus: the answer goes on behind the result, the decoder's prompt begins a turn."""
    silent = """
{%- for m in messages -%}
{%- if m.role == 'tool' -%}{{- '[' + m.content + ']' -}}
{%- elif m.role == 'assistant' and loop.previtem.role == 'tool' -%}{{- m.content + '<|im_end|>' -}}
{%- else -%}{{- '<|' + m.role + '|>' + m.content + ('' if m.tool_calls else '<|im_end|>') -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
    messages = [WHY, say("assistant", "look", tool_calls=[CALL]), say("tool", "here"), say("assistant", "the dog")]
    found, notes = learnt(tokenizer_of(silent), messages)
    assert not any("here" in each for each in found)
    assert notes["other prompt"] == 1


def test_an_answer_is_found_by_its_words_where_its_thoughts_are_not_written() -> None:
    """Two results of tools whose headers the template draws together, and thoughts that it never writes."""
    joined = """
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.previtem.role != 'tool' -%}{{- '<|im_start|>tool\n' -}}{%- endif -%}{{- m.content + '\n' -}}
{%- if not loop.last and loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
    thoughtful = say("assistant", "the dog", reasoning_content="so")
    messages = [WHY, say("assistant", "look"), say("tool", "here"), say("tool", "there"), thoughtful]
    assert learnt(tokenizer_of(joined), messages) == (["look<|im_end|>", "the dog<|im_end|>"], {"unwritten": 1})


def test_calls_under_roles_of_their_own(tmp_path: Path) -> None:
    """LLaMA-Factory's rows."""
    said = [
        ("human", "why"),
        ("function_call", '{"name": "look", "arguments": {}}'),
        ("ipython", "here"),
        ("gpt", "a fox"),
    ]
    rows = [{"from": role, "value": value} for role, value in said]
    chat = parse({"conversations": rows}, "conversations")
    assert [each["role"] for each in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1] == say("assistant", "", tool_calls=[CALL])
    with pytest.raises(BadRow, match="expected a call in JSON, with name and arguments"):
        parse({"conversations": [rows[0], rows[1] | {"value": "look"}, rows[3]]}, "conversations")


def test_thoughts_that_the_words_repeat_are_written_all_the_same() -> None:
    kind = KINDS["a history of empty thoughts behind prompts that open some"]
    messages = [WHY, say("assistant", "the dog.", reasoning_content="the dog")]
    assert learnt(kind.tokenizer(), messages) == (["the dog\n</think>\n\nthe dog.<|im_end|>"], {})


@pytest.mark.parametrize("held", ["<think>\nso\n</think>\n\n", "<think>\n\n</think>\n\n"])
def test_tags_of_a_row_behind_tags_of_a_prompt(held: str) -> None:
    messages = [WHY, say("assistant", held + "the dog")]
    open_, closed = after("</think>", "<think>"), after("</think>", "</think>")
    (found,), _ = learnt(tokenizer_of(open_), messages)
    assert found == held.removeprefix("<think>") + "the dog<|im_end|>"
    assert learnt(tokenizer_of(closed), messages) == (["the dog<|im_end|>"], {"thoughts": 1} if "so" in held else {})
    for pair in ("<think></think>", "<think>\n<budget>none is left</budget>\n</think>"):
        said = learnt(tokenizer_of(after("</think>", pair)), [WHY, say("assistant", "the dog")])
        assert said[0] == ["the dog<|im_end|>"]


def test_thoughts_reach_a_template_by_every_name() -> None:
    named = after("").replace("m.reasoning_content", "m.reasoning")
    apart = [WHY, say("assistant", "the dog", reasoning_content="so")]
    assert learnt(tokenizer_of(named), apart) == (["<think>so</think>the dog<|im_end|>"], {})


PARTS = """
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '[INST]' + m.content + '[/INST]' -}}
{%- elif m.content is string -%}{{- m.content + '<|im_end|>' -}}
{%- else -%}
{%- for part in m.content -%}
{%- if part['type'] == 'thinking' -%}{{- '[THINK]' + part['thinking'] + '[/THINK]' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}{{- '<|im_end|>' -}}
{%- endif -%}
{%- endfor -%}"""
THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "so"}], "closed": True}


@pytest.mark.parametrize(
    "turn",
    [
        say("assistant", "the dog", reasoning_content="so"),
        {"role": "assistant", "content": [THINKING, {"type": "text", "text": "the dog"}]},
        {"role": "assistant", "content": [THINKING | {"thinking": "so"}, {"type": "text", "text": "the dog"}]},
        say("assistant", "[THINK]so[/THINK]the dog"),
    ],
)
def test_thoughts_may_be_parts_of_the_content(turn: dict[str, Any]) -> None:
    """In rows, and in templates: Mistral's."""
    found = (["[THINK]so[/THINK]the dog<|im_end|>"], {})
    assert learnt(tokenizer_of(PARTS), [WHY, turn]) == found
    marked = PARTS.replace("m.content is string", "false").replace(
        "{%- for part in m.content -%}", "{%- generation -%}{%- for part in m.content -%}"
    )
    marked = marked.replace(
        "{{- '<|im_end|>' -}}\n{%- endif -%}", "{{- '<|im_end|>' -}}{%- endgeneration -%}\n{%- endif -%}"
    )
    if "[THINK]" not in str(turn["content"]):
        assert learnt(tokenizer_of(marked), [WHY, turn]) == found
    if turn.get("reasoning_content") is None and isinstance(turn["content"], list):
        assert learnt(KINDS["Qwen3, thinking"].tokenizer(), [WHY, turn])[0] == [
            "<think>\nso\n</think>\n\nthe dog<|im_end|>"
        ]
