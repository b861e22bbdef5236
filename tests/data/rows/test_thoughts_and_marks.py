"""Odd turns by odd templates: thoughts that are cut, doubled or never written, marks, and what `loss_on: all` leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.config import DataConfig
from draftsmith.data.rows.chats.ends import endless_answers
from draftsmith.data.rows.chats.spoken import ids_of, message_of
from draftsmith.data.rows.chats.tags import own_thoughts
from draftsmith.data.rows.chats.written import Origin, Turn, Written
from draftsmith.data.rows.encode import Encoded, Encoder
from draftsmith.data.rows.raw import BadRow
from draftsmith.data.rows.shapes import Chat, parse
from draftsmith.data.rows.templates import check_values, named_template, reads_clock, render_chat
from draftsmith.errors import RequestError
from helpers.models.chat_templates import KINDS, say
from transformers import PreTrainedTokenizerFast

DAY = "2026-07-01"
QWEN3 = KINDS["Qwen3, thinking"]
EMPTIED = KINDS["a history of empty thoughts behind prompts that open some"]
GLM = KINDS["GLM, `enable_thinking: false`"]
PLAIN = """
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
TRIMMED = PLAIN.replace("m.content", "m.content | trim")
DROPPED = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = QWEN3.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def encoded(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **config: Any) -> Encoded:
    encoder = Encoder.of(tokenizer, DataConfig(template_date=DAY, **config))
    (found,) = encoder([parse({"messages": messages}, "messages")])
    assert not isinstance(found, BadRow), found
    return found


def shown(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **config: Any) -> list[str]:
    """Each document as text, what is in the loss in brackets."""
    found = []
    for document in encoded(tokenizer, messages, **config).documents:
        pieces, inside = [""], False
        for token, counts in zip(document.ids.tolist(), document.in_loss.tolist(), strict=True):
            if counts != inside:
                pieces[-1] += "[" if counts else "]"
            inside = counts
            pieces.append(tokenizer.decode([token]))
        found.append("".join(pieces) + ("]" if inside else ""))
    return found


def answers(*args: Any, **config: Any) -> list[str]:
    """What is in the loss, of all documents."""
    return [part.split("]")[0] for text in shown(*args, **config) for part in text.split("[")[1:]]


def notes(*args: Any, **config: Any) -> dict[str, int]:
    return dict(encoded(*args, **config).notes)


WHY, AND = say("user", "why"), say("user", "and")
TWO = [WHY, say("assistant", "the dog"), AND, say("assistant", "a fox")]


# ---- marks --------------------------------------------------------------------------------------


def test_marks_add_no_turn_that_is_not_learnt_without_them() -> None:
    marked = tokenizer_of(named_template("chatml"))
    assert len(answers(marked, TWO)) == 2
    (last,) = answers(marked, TWO, loss_on="last")
    assert last.startswith("a fox")
    opening = [say("assistant", "quick", weight=0), WHY, say("assistant", "the dog")]
    (only,) = answers(marked, opening)
    assert only.startswith("the dog")
    assert len(answers(marked, [{**TWO[0]}, {**TWO[1], "weight": 0}, *TWO[2:]])) == 1


# ---- thoughts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("thoughts", [{"reasoning_content": "so"}, {"reasoning": "so"}])
def test_what_the_target_writes_behind_closed_thoughts_is_kept(thoughts: dict[str, str]) -> None:
    """GLM's line feed, whether or not the row has thoughts, which are counted."""
    messages, values = [WHY, say("assistant", "the dog", **thoughts)], {"enable_thinking": False}
    assert answers(GLM.tokenizer(), messages, template_values=values) == ["\nthe dog<|endoftext|>"]
    assert notes(GLM.tokenizer(), messages, template_values=values) == {"thoughts": 1}


@pytest.mark.parametrize(
    ("turn", "learnt"),
    [
        (say("assistant", "<think>\nso the"), "<think>\nso the"),
        (say("assistant", "", reasoning_content="so the"), "<think>\nso the"),
        (say("assistant", "<think>\nso\n</think>\n\nthe"), "<think>\nso\n</think>\n\nthe"),
        (say("assistant", "the", reasoning_content="so"), "<think>\nso\n</think>\n\nthe"),
    ],
)
def test_nothing_closes_thoughts_in_which_an_answer_was_cut_off(turn: dict[str, Any], learnt: str) -> None:
    messages = [WHY, {**turn, "ended": False}]
    assert answers(QWEN3.tokenizer(), messages) == [learnt]
    assert notes(QWEN3.tokenizer(), messages) == {"cut": 1}


@pytest.mark.parametrize("turn", [say("assistant", "so the"), say("assistant", "<think>\nso the")])
def test_the_same_behind_a_prompt_that_opens_them(turn: dict[str, Any]) -> None:
    for kind in (EMPTIED, KINDS["DeepSeek R1 and what is distilled from it"]):
        assert answers(kind.tokenizer(), [WHY, {**turn, "ended": False}]) == ["so the"]
    apart = say("assistant", "", reasoning_content="so the", ended=False)
    assert answers(EMPTIED.tokenizer(), [WHY, apart]) == ["so the"]


def test_cut_thoughts_that_no_template_shows_leave_the_row_out() -> None:
    with pytest.raises(AssertionError, match="the template does not tell how they begin"):
        encoded(tokenizer_of(PLAIN), [WHY, say("assistant", "", reasoning_content="so", ended=False)])


@pytest.mark.parametrize("apart", ["so", ""])
def test_thoughts_in_two_places_are_written_once(apart: str) -> None:
    """By a template too that looks into the content only where no thoughts are apart."""
    turn = say("assistant", "<think>\nso\n</think>\n\nthe dog", reasoning_content=apart)
    believing = PLAIN.replace("m.content", "(m.reasoning_content or '') + m.content")
    assert answers(QWEN3.tokenizer(), [WHY, turn]) == ["<think>\nso\n</think>\n\nthe dog<|im_end|>"]
    (found,) = answers(tokenizer_of(believing), [WHY, turn])
    assert found.count("so") == 1


def test_what_a_template_leaves_out_is_counted() -> None:
    apart = [WHY, say("assistant", "the dog", reasoning_content="so")]
    assert notes(tokenizer_of(PLAIN), apart) == {"unwritten": 1}
    inline = [WHY, say("assistant", "<think>so</think>the dog")]
    assert notes(tokenizer_of(DROPPED), inline) == {"unwritten": 1}
    assert notes(tokenizer_of(PLAIN), inline) == {}
    blanks = [WHY, say("assistant", " the dog ")]
    assert notes(tokenizer_of(TRIMMED), blanks) == {"changed": 1}
    assert notes(tokenizer_of(PLAIN), blanks) == {}
    without = [WHY, say("assistant", "the dog")]
    assert notes(EMPTIED.tokenizer(), without) == {"no thoughts": 1}
    assert answers(EMPTIED.tokenizer(), without) == ["\n</think>\n\nthe dog<|im_end|>"]


# ---- loss_on: all -------------------------------------------------------------------------------


def test_everything_counts_but_what_nobody_wrote() -> None:
    plain = tokenizer_of(PLAIN)
    assert shown(plain, TWO, loss_on="all") == [f"[{plain_text(plain, TWO)}]"]
    cut = [TWO[0], {**TWO[1], "ended": False}, *TWO[2:]]
    assert "the dog]<|im_end|>[\n<|im_start|>user\nand" in shown(plain, cut, loss_on="all")[0]
    empty = [TWO[0], say("assistant", ""), *TWO[2:]]
    assert "assistant\n]<|im_end|>[\n<|im_start|>user" in shown(plain, empty, loss_on="all")[0]
    quiet = [TWO[0], TWO[1], {**TWO[2], "weight": 0}, TWO[3]]
    assert "<|im_start|>user\n]and[<|im_end|>\n<|im_start|>assistant" in shown(plain, quiet, loss_on="all")[0]
    assert notes(plain, cut, loss_on="all") == {"cut": 1}
    assert notes(plain, empty, loss_on="all") == {"empty": 1}


def test_a_marked_answer_of_a_chat_that_is_rewritten() -> None:
    """What is rewritten in a later document counts in its own alone, and a marked answer in none of them."""
    messages = [WHY, say("assistant", "the dog", reasoning_content="so", weight=0), AND, say("assistant", "a fox")]
    first, second = shown(QWEN3.tokenizer(), messages, loss_on="all")
    asked = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    assert first == f"[{asked}]<think>\nso\n</think>\n\nthe dog<|im_end|>"
    assert second == (
        f"{asked}the dog<|im_end|>\n<|im_start|>user\n[and]<|im_end|>\n<|im_start|>assistant\n"
        "[<think>\n\n</think>\n\na fox<|im_end|>]"
    )
    assert notes(QWEN3.tokenizer(), messages, loss_on="all") == {"marked": 1, "hollow": 1}


def plain_text(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> str:
    return render_chat(tokenizer, messages, answer_next=False)


# ---- variables and clocks -----------------------------------------------------------------------


def test_documents_reach_the_template() -> None:
    tokenizer = tokenizer_of("{%- for d in documents or [] -%}{{- d.text + '\n' -}}{%- endfor -%}" + PLAIN)
    values = {"documents": [{"text": "quick"}]}
    assert shown(tokenizer, TWO, template_values=values)[0].startswith("quick\n<|im_start|>user")
    assert shown(tokenizer, TWO)[0].startswith("<|im_start|>user")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_what_every_template_is_given_is_no_variable(name: str) -> None:
    tokenizer = tokenizer_of(f"{{# {name} #}}" + PLAIN)
    with pytest.raises(RequestError, match=f"sets {name!r}, which every template is given already"):
        check_values(tokenizer, {name: []})


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("form", ["%Y", "%H:%M:%S"])
def test_a_clock_is_noticed_wherever_it_is_read(role: str, form: str) -> None:
    shown_in = f"{{%- if m.role == '{role}' -%}}{{{{- strftime_now('{form}') -}}}}{{%- endif -%}}"
    assert reads_clock(tokenizer_of(PLAIN.replace("{{- '<|im_start|>'", shown_in + "{{- '<|im_start|>'")))
    assert not reads_clock(tokenizer_of(PLAIN + "{%- if false -%}{{- strftime_now('%Y') -}}{%- endif -%}"))


# ---- rows ---------------------------------------------------------------------------------------


def test_thoughts_alone_are_an_answer(tmp_path: Path) -> None:
    row = {"messages": [WHY, say("assistant", "", thinking="so", ended=False)]}
    record = parse(json.loads(json.dumps(row)), "messages")
    assert isinstance(record, Chat)
    with pytest.raises(BadRow, match="every assistant turn is empty"):
        parse({"messages": [WHY, say("assistant", "", thinking=" ")]}, "messages")


# ---- ids beside text ----------------------------------------------------------------------------


def with_ids(tokenizer: PreTrainedTokenizerFast, *texts: str, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """A row of chats whose answers came in ids; each text is an answer, its end included."""
    messages: list[dict[str, Any]] = []
    turns = []
    for text in texts:
        messages.append(WHY)
        prompt = render_chat(tokenizer, messages, answer_next=True, values=values, day=DAY)
        ids = [ids_of(tokenizer, each) for each in (prompt, text)]
        messages.append(say("assistant", text.removesuffix("<|im_end|>")))
        turns.append(Turn(len(messages) - 1, *ids, ended=True))
    written = Written(Origin.of(tokenizer, values), tuple(turns))
    return {"messages": messages, "ids": written.to_row()}


def read(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], **config: Any) -> Encoded | BadRow:
    (found,) = Encoder.of(tokenizer, DataConfig(template_date=DAY, **config))([parse(row, "messages")])
    return found


def test_ids_are_of_one_template_with_its_variables() -> None:
    tokenizer = tokenizer_of(PLAIN + "{# style #}")
    row = with_ids(tokenizer, "the dog<|im_end|>", values={"style": 1})
    for values, by_ids in (({"style": 1}, True), ({"style": 2}, False), (None, False)):
        found = read(tokenizer, row, template_values=values)
        assert isinstance(found, Encoded)
        assert found.by_ids == by_ids


def test_an_empty_answer_in_ids_is_not_learnt() -> None:
    tokenizer = tokenizer_of(PLAIN)
    found = read(tokenizer, with_ids(tokenizer, "the dog<|im_end|>", "<|im_end|>"))
    assert isinstance(found, Encoded)
    assert found.notes == {"empty": 1}
    (document,) = found.documents
    assert tokenizer.decode(document.ids[document.in_loss]) == "the dog<|im_end|>"


def test_ids_beyond_the_tokenizer_leave_a_row_out() -> None:
    tokenizer = tokenizer_of(PLAIN)
    row = with_ids(tokenizer, "the dog<|im_end|>")
    row["ids"]["turns"][0]["answer"][0] = len(tokenizer) - 1
    assert isinstance(read(tokenizer, row), Encoded)
    row["ids"]["turns"][0]["answer"][0] = len(tokenizer)
    assert "are none of the tokenizer's" in str(read(tokenizer, row))


def test_an_answer_without_ids_beside_those_that_have_some_is_counted() -> None:
    """A turn that was added by hand: nothing is learnt of it, and it is said."""
    tokenizer = tokenizer_of(PLAIN)
    row = with_ids(tokenizer, "the dog<|im_end|>")
    row["messages"] += [AND, say("assistant", "a fox")]
    found = read(tokenizer, row)
    assert isinstance(found, Encoded)
    assert found.notes == {"without ids": 1}


def test_a_text_that_was_edited_beside_its_ids_is_not_learnt() -> None:
    tokenizer = tokenizer_of(PLAIN)
    row = with_ids(tokenizer, "the dog<|im_end|>", "a fox<|im_end|>")
    row["messages"][1]["content"] = "the cat"
    found = read(tokenizer, row)
    assert isinstance(found, Encoded)
    assert found.notes == {"edited": 1}
    assert [tokenizer.decode(each.ids[each.in_loss]) for each in found.documents] == ["a fox<|im_end|>"]


# ---- small print --------------------------------------------------------------------------------


def test_marks_of_a_history_that_is_rewritten_count_once() -> None:
    """Every document has the marks of its own answer alone."""
    written = "{%- if loop.last -%}{{- '<think>\n' + (m.reasoning_content or '') + '</think>' -}}{%- endif -%}{{- m.content -}}"
    marked = f"{{%- generation -%}}{written}{{%- endgeneration -%}}"
    template = PLAIN.replace(
        "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}",
        "{{- '<|im_start|>' + m.role + '\n' -}}{%- if m.role == 'assistant' -%}"
        + marked
        + "{%- else -%}{{- m.content -}}{%- endif -%}{{- '<|im_end|>\n' -}}",
    )
    found = answers(tokenizer_of(template), TWO)
    assert sorted(found) == ["<think>\n</think>a fox", "<think>\n</think>the dog"]


def test_blanks_around_thoughts_are_the_prompts_own() -> None:
    turn = say("assistant", "the dog", reasoning_content="\nso\n\n")
    assert answers(EMPTIED.tokenizer(), [WHY, turn]) == ["so\n</think>\n\nthe dog<|im_end|>"]


def test_blanks_are_no_thoughts_beside_those_of_another_field() -> None:
    turn = say("assistant", "the dog", reasoning_content=" \n", reasoning="so")
    assert answers(QWEN3.tokenizer(), [WHY, turn]) == ["<think>\nso\n</think>\n\nthe dog<|im_end|>"]
    assert own_thoughts({"reasoning_content": " \n"}) is None


def test_an_answer_in_the_middle_ends_in_front_of_the_next_turn() -> None:
    """Of a template that ends no turn, where no end of the target says so."""
    lines = (
        "{% for m in messages %}{{ m.role + ':\\n' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
    )
    found = answers(tokenizer_of(lines), [*TWO, AND, say("assistant", "it")])
    assert [each.split("\n")[0] for each in found] == ["the dog", "a fox", "it"]
    assert not any("user" in each for each in found)


def test_a_long_pair_of_tags_closes_thoughts() -> None:
    pair = "<|START_THINKING|>\n\n\n<|END_THINKING|>\n\n\n"
    template = PLAIN.replace("'<|im_start|>assistant\n'", f"'<|im_start|>assistant\n{pair}'")
    turn = say("assistant", "the dog", reasoning_content="so")
    assert answers(tokenizer_of(template), [WHY, turn]) == ["the dog<|im_end|>"]


def test_channels_of_thoughts_are_paragraphs() -> None:
    tokenizer = KINDS["gpt-oss"].tokenizer()
    text = "".join(
        f"<|start|>assistant<|channel|>{channel}<|message|>{words}<|end|>"
        for channel, words in (("analysis", "so"), ("commentary", "and"), ("final", "the dog"))
    )
    turn = message_of(tokenizer, text.removeprefix("<|start|>assistant"), "")
    assert (turn["reasoning_content"], turn["content"]) == ("so\nand", "the dog")


def test_any_end_of_the_target_may_end_its_answers() -> None:
    tokenizer = tokenizer_of(PLAIN)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert endless_answers(tokenizer, [0, end]) is None
    assert endless_answers(tokenizer, [end, 0]) is None
    assert "which is no end of the target" in str(endless_answers(tokenizer, [5]))


# ---- what a template writes around the target's own text ----------------------------------------

HEADED = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- '<|im_start|>assistant\n' + head -}}{%- else -%}{{- '<|im_start|>' + m.role + '\n' -}}{%- endif -%}
{{- m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' + prompt -}}{%- endif -%}"""


def headed(head: str, prompt: str) -> PreTrainedTokenizerFast:
    """Turns of the assistant begin with `head`, prompts end with `prompt`."""
    return tokenizer_of(f"{{%- set head = {head!r} -%}}{{%- set prompt = {prompt!r} -%}}" + HEADED)


def test_an_opening_tag_of_the_history_is_the_prompts() -> None:
    tokenizer = headed("<think>\n\n", "<think>\n\n")
    (found,) = answers(tokenizer, [WHY, say("assistant", "the dog", reasoning_content="so")])
    assert found == "so\n</think>\n\nthe dog<|im_end|>"


@pytest.mark.parametrize("closed", ["<think>\n\n</think>\n\n", "</think>"])
def test_thoughts_behind_a_prompt_that_has_closed_them_are_left_out(closed: str) -> None:
    tokenizer = headed(closed, closed)
    thoughtful = [WHY, say("assistant", "<think>\nso\n</think>\n\nthe dog")]
    assert answers(tokenizer, thoughtful) == ["the dog<|im_end|>"]
    assert notes(tokenizer, thoughtful) == {"thoughts": 1}
    cut = [WHY, say("assistant", "<think>\nso the", ended=False), AND, say("assistant", "a fox")]
    assert answers(tokenizer, cut) == ["a fox<|im_end|>"]
    assert notes(tokenizer, cut) == {"thoughts": 1, "cut": 1}


def test_one_pair_of_tags_is_written() -> None:
    """An empty one takes the row's thoughts, or makes room for the row's own tags."""
    tokenizer = headed("<think></think>", "")
    assert answers(tokenizer, [WHY, say("assistant", "the dog", reasoning_content="so")]) == [
        "<think>so</think>the dog<|im_end|>"
    ]
    assert answers(tokenizer, [WHY, say("assistant", "<think>so</think>the dog")]) == [
        "<think>so</think>the dog<|im_end|>"
    ]
    assert answers(tokenizer, [WHY, say("assistant", "the dog")]) == ["<think></think>the dog<|im_end|>"]


CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


def test_a_turn_of_which_nothing_is_written_is_empty() -> None:
    """Its end alone would be learnt."""
    plain = tokenizer_of(PLAIN)
    for silent in (say("assistant", "", tool_calls=[CALL]), say("assistant", "", reasoning_content="so")):
        messages = [WHY, silent, AND, say("assistant", "a fox")]
        assert answers(plain, messages) == ["a fox<|im_end|>"]
        assert notes(plain, messages) == {"empty": 1}
    spoken = [WHY, say("assistant", "so", tool_calls=[CALL])]
    assert answers(plain, spoken) == ["so<|im_end|>"]
    assert notes(plain, spoken) == {"calls": 1}


def test_an_answer_ends_with_its_first_end() -> None:
    tokenizer = tokenizer_of(PLAIN + "{%- if not add_generation_prompt -%}{{- '<|endoftext|>' -}}{%- endif -%}")
    assert answers(tokenizer, TWO) == ["the dog<|im_end|>\n<|endoftext|>", "a fox<|im_end|>\n<|endoftext|>"]
    tokenizer.eos_token = "<|im_end|>"
    assert answers(tokenizer, TWO) == ["the dog<|im_end|>", "a fox<|im_end|>"]


def test_an_answer_behind_turns_that_are_written_anew() -> None:
    """Thoughts between calls leave the chat when an answer stands behind them: the usual row of an agent."""
    template = PLAIN.replace(
        "m.content +",
        "(('THOUGHT' + m.reasoning_content) if m.reasoning_content and messages[-1].role == 'tool' else '') + m.content +",
    )
    called = say("assistant", "look", reasoning_content="so")
    messages = [WHY, called, say("tool", "here"), say("assistant", "the dog")]
    found = shown(tokenizer_of(template), messages, loss_on="last")
    assert found == [
        "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\nTHOUGHTsolook<|im_end|>\n<|im_start|>tool\nhere<|im_end|>\n"
        "<|im_start|>assistant\n[the dog<|im_end|>]"
    ]


def test_a_turn_whose_cut_cannot_be_told_takes_no_other_along() -> None:
    cut = say("assistant", "", reasoning_content="so the", ended=False)
    messages = [WHY, cut, AND, say("assistant", "a fox")]
    assert answers(tokenizer_of(PLAIN), messages) == ["a fox<|im_end|>"]
    assert notes(tokenizer_of(PLAIN), messages) == {"other prompt": 1}


def test_marks_around_a_header_leave_it_out() -> None:
    marked = PLAIN.replace(
        "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}",
        "{%- if m.role == 'assistant' -%}{%- generation -%}{{- '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' -}}"
        "{%- endgeneration -%}{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}",
    )
    assert answers(tokenizer_of(marked), TWO) == ["the dog<|im_end|>", "a fox<|im_end|>"]


def test_a_tag_in_front_of_the_end_is_no_other_end() -> None:
    tokenizer = tokenizer_of(PLAIN.replace("'<|im_end|>\n'", "'<|endoftext|><|im_end|>\n'"))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert endless_answers(tokenizer, [end]) is None
    assert "ends answers by '<|endoftext|>'" in str(endless_answers(tokenizer, [5]))
