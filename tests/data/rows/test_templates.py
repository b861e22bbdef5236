"""Chats as text: which tokens count, by marks and by prefixes, and prompts as the decoder sees them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.config import DataConfig
from draftsmith.data.prompts import Prompt, render
from draftsmith.data.rows.encode import Encoded, Encoder
from draftsmith.data.rows.prepare import prepare
from draftsmith.data.rows.raw import BadRow
from draftsmith.data.rows.shapes import Chat
from draftsmith.data.rows.templates import ChatTemplate, named_template, render_chat
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.errors import DataError, RequestError
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

MARKED = named_template("chatml")
UNMARKED = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", MARKED)
STRIPPING = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content | trim) + '<|im_end|>' }}"
    "{{ '\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
# as Llama 2 does: the system text goes inside the first user turn
MERGED = (
    "{%- if messages[0].role == 'system' %}{% set head = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}"
    "{%- for m in rest %}{%- if m.role == 'user' %}"
    "{{ '[INST] ' + (('<<SYS>>' + head + '<</SYS>>') if loop.first and head else '') + m.content | trim"
    " + ' [/INST]' }}{%- else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{%- endif %}{%- endfor %}"
)
# as Qwen3 does: reasoning stays in the last answer alone
LAST_REASONS = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{%- endif %}"
    "{{ m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def say(role: str, content: str, **more: object) -> dict:
    return {"role": role, "content": content, **more}


CHATS = {
    "one turn": [say("user", "the fox asks"), say("assistant", "the dog answers")],
    "multi-turn": [say("user", "a"), say("assistant", "quick"), say("user", "b"), say("assistant", "lazy dog")],
    "system": [say("system", "be brief"), say("user", "why"), say("assistant", "no")],
    "tool": [
        say("user", "time?"),
        say("assistant", "", tool_calls=[{"name": "clock"}]),
        say("tool", "12:00"),
        say("assistant", "noon"),
    ],
    "empty turns": [say("user", ""), say("assistant", ""), say("user", "x"), say("assistant", "y")],
    "blanks around": [
        say("user", "  a \n"),
        say("assistant", "  quick  \n"),
        say("user", "b"),
        say("assistant", " z "),
    ],
    "opens with the assistant": [say("assistant", "hello"), say("user", "b"), say("assistant", "yes")],
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["the quick brown fox asks and a lazy dog answers\n"] * 20, 400)


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = template
    return tokenizer


def taught(tokenizer: PreTrainedTokenizerFast, messages: list[dict], **config: object) -> str:
    """The text of the tokens in the loss, with a bar between stretches, a slash between documents."""
    encoder = Encoder.of(tokenizer, DataConfig(**config))
    (encoded,) = encoder([Chat(messages)])
    assert isinstance(encoded, Encoded), encoded
    parts = []
    for document in encoded.documents:
        inside = False
        for token, counted in zip(document.ids.tolist(), document.in_loss.tolist()):
            if counted:
                parts.append(tokenizer.decode([token]) if inside else f"|{tokenizer.decode([token])}")
            inside = counted
        parts.append("/")
    return "".join(parts).strip("|/")


@pytest.mark.parametrize("name", [name for name in CHATS if name != "opens with the assistant"])
def test_prefixes_find_what_marks_mark(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    by_marks = taught(with_template(tokenizer, MARKED), CHATS[name])
    by_prefixes = taught(with_template(tokenizer, UNMARKED), CHATS[name])
    assert by_marks == by_prefixes


@pytest.mark.parametrize(
    ("template", "name", "expected"),
    [
        (MARKED, "one turn", "the dog answers<|endoftext|>"),
        (MARKED, "multi-turn", "quick<|endoftext|>|lazy dog<|endoftext|>"),
        (MARKED, "tool", '[{"name": "clock"}]<|endoftext|>|noon<|endoftext|>'),
        (MARKED, "empty turns", "y<|endoftext|>"),
        (STRIPPING, "blanks around", "quick<|im_end|>|z<|im_end|>"),
        (STRIPPING, "system", "no<|im_end|>"),
        (MERGED, "multi-turn", " quick <|endoftext|>| lazy dog <|endoftext|>"),
        (MERGED, "system", " no <|endoftext|>"),
        (UNMARKED, "opens with the assistant", "yes<|endoftext|>"),
    ],
)
def test_what_counts(tokenizer: PreTrainedTokenizerFast, template: str, name: str, expected: str) -> None:
    assert taught(with_template(tokenizer, template), CHATS[name]) == expected


def test_all_counts_when_asked(tokenizer: PreTrainedTokenizerFast) -> None:
    text = taught(with_template(tokenizer, MARKED), CHATS["one turn"], loss_on="all")
    assert text == render_chat(tokenizer, CHATS["one turn"], answer_next=False)


def test_the_decoders_prompt_begins_the_training_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """Prompt ids of the decoder + ids in the loss = ids of the row, token for token."""
    with_template(tokenizer, MARKED)
    messages = CHATS["multi-turn"]
    (encoded,) = Encoder.of(tokenizer, DataConfig())([Chat(messages)])
    assert isinstance(encoded, Encoded)
    prompt = render(Prompt("1", "all", ("a", "b"), chat=True), tokenizer, answers=["quick"])
    ids = encoded.document.ids.tolist()
    assert ids[: len(prompt)] == prompt
    assert encoded.document.in_loss[len(prompt) :].tolist()[:3] == [True] * 3
    assert not encoded.document.in_loss[len(prompt) - 1]


def test_a_prompt_rendered_otherwise_stops_the_run(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """An answer that the template writes with a mark that prompts do not have."""
    with_template(tokenizer, LAST_REASONS.replace("<think></think>", "")).chat_template = UNMARKED.replace(
        "'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\nSure: '"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "why", "completion": "because"}\n')
    with pytest.raises(DataError, match="the decoder's prompt reads"):
        prepare(DataConfig(source=str(rows), cache=str(tmp_path)), tokenizer, out=None)


def test_an_override_must_render_prompts_as_the_decoder_does(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with_template(tokenizer, UNMARKED)
    (tmp_path / "marked.jinja").write_text(MARKED)
    (tmp_path / "other.jinja").write_text(MERGED)
    messages = CHATS["one turn"]
    marked = taught(tokenizer, messages, chat_template=str(tmp_path / "marked.jinja"))
    assert marked == "the dog answers<|endoftext|>"
    encoder = Encoder.of(tokenizer, DataConfig(chat_template=str(tmp_path / "other.jinja")))
    (encoded,) = encoder([Chat(messages)])
    assert isinstance(encoded, BadRow)
    assert "the decoder's prompt reads" in str(encoded)


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{% generation %}{% endgeneration %}" + UNMARKED, "mask is empty"), ("{% if messages", "not valid Jinja")],
)
def test_hopeless_templates_stop_the_run(
    tokenizer: PreTrainedTokenizerFast, template: str, reason: str, tmp_path: Path
) -> None:
    with_template(tokenizer, template)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "why", "completion": "because"}\n' * 3)
    with pytest.raises(DataError, match=reason):
        prepare(DataConfig(source=str(rows), cache=str(tmp_path)), tokenizer, out=None)


def test_marks_around_everything_are_none(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = CHATS["multi-turn"]
    with_template(tokenizer, UNMARKED)
    expected = taught(tokenizer, messages)
    with_template(tokenizer, "{% generation %}" + UNMARKED + "{% endgeneration %}")
    assert taught(tokenizer, messages) == expected


def test_rows_whose_own_masks_leave_nothing_out_stop_the_run(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [n, 6, 7], "loss_mask": [1, 1, 1]}) + "\n" for n in range(3)))
    with pytest.raises(DataError, match="mask is full"):
        prepare(DataConfig(source=str(rows), validation=str(rows), cache=str(tmp_path)), tokenizer, out=None)


def test_no_template(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Prompt and completion are written one after the other; chats are refused by name."""
    tokenizer.chat_template = None
    encoder = Encoder.of(tokenizer, DataConfig())
    (encoded,) = encoder([Chat([say("user", "why"), say("assistant", " not")], plain=True)])
    assert isinstance(encoded, Encoded)
    assert tokenizer.decode(encoded.document.ids[encoded.document.in_loss]) == " not<|endoftext|>"
    with pytest.raises(RequestError, match="no chat template"):
        encoder([Chat(CHATS["one turn"])])
    assert not ChatTemplate(tokenizer, None).exists


def test_a_turn_that_is_written_otherwise_when_last(tokenizer: PreTrainedTokenizerFast) -> None:
    text = taught(with_template(tokenizer, LAST_REASONS), CHATS["multi-turn"])
    assert text == "<think></think>quick<|im_end|>/|<think></think>lazy dog<|im_end|>"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_thoughts_have_the_name_that_a_template_reads(
    tokenizer: PreTrainedTokenizerFast, name: str, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older releases of transformers leave the names as they are."""
    monkeypatch.setattr(chat_template_utils, "_alias_reasoning_fields", lambda chat: chat, raising=False)
    template = "{%- for m in messages %}{{ m.role + ': ' + (m." + read + " or '') + m.content + '\n' }}{%- endfor %}"
    chat = [say("user", "why"), say("assistant", "no", **{name: "so, "})]
    text = render_chat(tokenizer, chat, answer_next=False, template=template)
    assert text == "user: why\nassistant: so, no\n"


@pytest.mark.parametrize("turn", [{"weight": 0}, {"content": ""}])
def test_an_empty_mask_says_why(turn: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with_template(tokenizer, UNMARKED)
    messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [*messages, messages[0], messages[1] | turn]}) + "\n")
    config = DataConfig(source=str(rows), validation=str(rows), cache=str(tmp_path), loss_on="last")
    with pytest.raises(DataError, match="Its answers are left out: 1 (empty|marked as not to be trained on)"):
        prepare(config, tokenizer, out=None)
