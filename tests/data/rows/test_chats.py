"""What stands beside a chat's turns, and in them: system texts, tools, marks, variables and days of templates."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.config import DataConfig
from draftsmith.data.generate.answers import Asker, Reply
from draftsmith.data.generate.trial import FIRST
from draftsmith.data.prompts import load_prompts, render
from draftsmith.data.rows.chats.ends import endless_answers
from draftsmith.data.rows.chats.spoken import message_of
from draftsmith.data.rows.encode import Encoded, Encoder
from draftsmith.data.rows.prepare import prepare
from draftsmith.data.rows.raw import BadRow
from draftsmith.data.rows.records import Placed
from draftsmith.data.rows.shapes import Chat, digest, find_shape, parse
from draftsmith.data.rows.templates import ChatTemplate, named_template, reads_clock
from draftsmith.errors import DataError, RequestError
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.train.run import on_a_day
from helpers.models.chat_templates import KINDS, say
from transformers import PreTrainedTokenizerFast

ASK = [say("user", "why"), say("assistant", "so")]
SHAPES: list[dict[str, Any]] = [
    {"messages": ASK},
    {"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]},
    {"prompt": "why", "completion": "so"},
    {"prompt": ASK[:1], "completion": ASK[1:]},
    {"instruction": "why", "output": "so"},
]


def read(row: dict[str, Any]) -> Chat:
    shape = find_shape(row)
    assert shape is not None
    record = parse(row, shape)
    assert isinstance(record, Chat)
    return record


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return KINDS["Gemma"].tokenizer()


def encoded(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **config: Any) -> Encoded:
    (result,) = Encoder.of(tokenizer, DataConfig(**config))([read({"messages": messages})])
    assert isinstance(result, Encoded), result
    return result


def in_loss(tokenizer: PreTrainedTokenizerFast, found: Encoded) -> list[str]:
    return [tokenizer.decode(each.ids[each.in_loss]) for each in found.documents]


@pytest.mark.parametrize("row", SHAPES)
@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_a_system_text_beside_any_shape_is_its_first_turn(row: dict[str, Any], column: str) -> None:
    assert read({**row, column: "be brief"}).messages == [say("system", "be brief"), *read(row).messages]
    assert read({**row, column: None}) == read(row)
    with pytest.raises(BadRow, match="different texts"):
        read({**row, "system": "a", "system_prompt": "b"})


def test_a_system_turn_is_not_put_there_twice() -> None:
    messages = [say("system", "be brief"), *ASK]
    assert read({"messages": messages, "system": "be brief"}).messages == messages


@pytest.mark.parametrize(
    ("given", "expected"),
    [('{"town": "Ulm"}', {"town": "Ulm"}), (None, {}), ({"a": 1}, {"a": 1}), ("Ulm", "Ulm"), ("[1]", "[1]")],
)
def test_arguments_that_are_the_text_of_an_object_become_it(given: Any, expected: Any) -> None:
    call = {"name": "look", "arguments": given}
    for turn in (
        say("assistant", "", tool_calls=[{"type": "function", "function": call}]),
        say("assistant", "", function_call=call),
    ):
        record = read({"messages": [say("user", "why"), turn, say("function", "here", name="look")]})
        (found,) = record.messages[1]["tool_calls"]
        assert found == {"type": "function", "function": {"name": "look", "arguments": expected}}
        assert record.loose == isinstance(expected, str)
        assert record.messages[2]["role"] == ("tool" if "function_call" in turn else "function")


def test_tools_under_their_older_name_and_as_text() -> None:
    tool = {"name": "look", "parameters": '{"type": "object"}'}
    expected = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    assert read({"messages": ASK, "functions": [tool]}).tools == expected
    assert read({"messages": ASK, "tools": json.dumps([{"type": "function", "function": tool}])}).tools == expected


def test_a_template_that_takes_arguments_as_text_alone_gets_text(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = KINDS["Gemma"].tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<start_of_turn>' + m.content }}{% for c in m.tool_calls %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{{ '<end_of_turn>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>' }}{% endif %}"
    )
    call = {"function": {"name": "look", "arguments": {"town": "Ulm"}}}
    found = encoded(tokenizer, [say("user", "why"), say("assistant", "", tool_calls=[call])])
    assert in_loss(tokenizer, found) == ['look{"town": "Ulm"}<end_of_turn>']


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_turns_that_are_marked_are_not_learnt(tokenizer: PreTrainedTokenizerFast, mark: dict[str, Any]) -> None:
    messages = [say("user", "a"), say("assistant", "no", **mark), say("user", "b"), say("assistant", "yes", weight=1)]
    found = encoded(tokenizer, messages)
    assert in_loss(tokenizer, found) == ["yes<end_of_turn>"]
    assert found.notes == {"marked": 1}
    (whole,) = encoded(tokenizer, messages, loss_on="all").documents
    assert tokenizer.decode(whole.ids[~whole.in_loss]) == "no<end_of_turn>"


@pytest.mark.parametrize(
    ("mark", "reason"), [({"weight": 0.5}, "expected 0 or 1"), ({"train": "no"}, "true or false")]
)
def test_marks_that_say_neither(mark: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        read({"messages": [say("user", "a"), say("assistant", "no", **mark)]})


def test_the_last_answer_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [say("user", "a"), say("assistant", "no"), say("user", "b"), say("assistant", "yes"), say("user", "c")]
    assert in_loss(tokenizer, encoded(tokenizer, messages, loss_on="last")) == ["yes<end_of_turn>"]
    thinking = KINDS["Qwen3, thinking"]
    own = thinking.tokenizer()
    found = encoded(own, thinking.messages, loss_on="last")
    assert in_loss(own, found) == [thinking.written[1]]


def test_an_empty_answer_has_no_end_to_learn(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [say("user", "a"), say("assistant", ""), say("user", "b"), say("assistant", "yes")]
    found = encoded(tokenizer, messages)
    assert in_loss(tokenizer, found) == ["yes<end_of_turn>"]
    assert found.notes == {"empty": 1}


@pytest.mark.parametrize("template", ["Gemma", "chatml"])
def test_a_cut_answer_is_learnt_without_an_end(template: str) -> None:
    tokenizer = KINDS["Gemma"].tokenizer()
    if template == "chatml":
        tokenizer.chat_template = named_template("chatml")
    messages = [say("user", "a"), say("assistant", "no fox", ended=False), say("user", "b"), say("assistant", "yes")]
    end = "<end_of_turn>" if template == "Gemma" else "<|endoftext|>"
    found = encoded(tokenizer, messages)
    assert "".join(in_loss(tokenizer, found)) == f"no foxyes{end}"
    assert found.notes == {"cut": 1}


def test_prompts_that_open_or_close_thoughts_and_rows_that_do_not() -> None:
    opens, closes = KINDS["DeepSeek R1 and what is distilled from it"].tokenizer(), KINDS["Qwen3, thinking"]
    found = encoded(opens, ASK)
    assert in_loss(opens, found) == ["so<|endoftext|>"]
    assert found.notes == {"no thoughts": 1}
    apart = [say("user", "why"), say("assistant", "so", reasoning_content="hm")]
    assert in_loss(opens, encoded(opens, apart)) == ["hm\n</think>\n\nso<|endoftext|>"]
    own = closes.tokenizer()
    found = encoded(own, apart, template_values={"enable_thinking": False})
    assert in_loss(own, found) == ["so<|im_end|>"]
    assert found.notes == {"thoughts": 1}


def test_equal_texts_stay_together_whatever_their_ids() -> None:
    ids = {"tokenizer": "t", "template": "u", "turns": [{"turn": 1, "prompt": [1], "answer": [2], "ended": False}]}
    assert digest(read({"messages": ASK, "ids": ids})) == digest(read({"messages": ASK}))


@pytest.mark.parametrize("turn", [{"turn": 0}, {"turn": 9}, {"answer": [10**6]}, {"prompt": []}])
def test_ids_that_are_not_of_the_row(tokenizer: PreTrainedTokenizerFast, turn: dict[str, Any]) -> None:
    encoder = Encoder.of(tokenizer, DataConfig())
    ids = {**vars(encoder.origin), "turns": [{"turn": 1, "prompt": [1], "answer": [2], "ended": False} | turn]}
    (found,) = encoder([read({"messages": ASK, "ids": ids})])
    assert isinstance(found, BadRow)


def test_columns_that_nothing_reads_are_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": ASK, "images": ["x"], "domain": None}, {"messages": ASK, "domain": "law", "system": "no"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level("INFO"):
        found = prepare(DataConfig(source=str(path), validation=str(path), cache=str(tmp_path)), tokenizer, out=None)
    assert found.report.unread == ["images", "domain"]
    assert "columns     not read: images, domain" in caplog.text


def test_a_variable_that_no_template_reads_is_refused() -> None:
    tokenizer = KINDS["Qwen3, thinking"].tokenizer()
    with pytest.raises(RequestError, match="sets 'enable_thinkin', .* asks for enable_thinking"):
        ChatTemplate(tokenizer, None, {"enable_thinkin": False})
    with pytest.raises(RequestError, match="data.template_values .* no variable of a chat template"):
        load_recipe("distill-tiny", [("data.template_values", "{messages: []}")])
    with pytest.raises(RequestError, match="data.template_date .* 2026-07-01"):
        load_recipe("distill-tiny", [("data.template_date", "tomorrow")])


def test_a_clock_shows_the_day_that_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows and prompts; the key knows it, and for templates without a clock it changes nothing."""
    kind, today = KINDS["Llama 3.1, tools and a date"], "draftsmith.data.rows.prepare.today"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(kind.row()) + "\n")
    dated, plain = kind.tokenizer(), KINDS["Gemma"].tokenizer()
    assert reads_clock(dated)
    assert not reads_clock(dated, values={"date_string": "26 Jul 2024"})
    assert not reads_clock(plain)

    def rows(tokenizer: PreTrainedTokenizerFast, day: str | None = None, now: str = "2026-07-01") -> tuple[str, str]:
        monkeypatch.setattr(today, lambda: now)
        config = DataConfig(source=str(path), validation=str(path), cache=str(tmp_path / "cache"), template_date=day)
        found = prepare(config, tokenizer, out=None)
        return found.report.fingerprint, tokenizer.decode(found.train.ids_RS[0])

    assert "Today Date: 01 Jul 2026" in rows(dated)[1]
    assert rows(dated) == rows(dated, "2026-07-01") == rows(dated, "2026-07-01", now="2026-08-01")
    assert rows(dated)[0] != rows(dated, now="2026-08-01")[0]
    config = DataConfig(template_date="2026-07-02")
    (prompt,) = load_prompts(str(path), data=config)
    assert "Today Date: 02 Jul 2026" in dated.decode(render(prompt, dated))


def test_a_run_keeps_the_day_on_which_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["Llama 3.1, tools and a date"]
    kind.tokenizer().save_pretrained(tmp_path / "target")
    run = tmp_path / "run"
    run.mkdir()

    def day(name: str, now: str, *more: tuple[str, str], resume: str = "auto") -> str | None:
        monkeypatch.setattr("draftsmith.data.rows.templates.today", lambda: now)
        flags = [("target.path", str(tmp_path / name)), *more]
        resolved = on_a_day(load_recipe("distill-tiny", flags), run, resume)
        (run / "run.yaml").write_text(resolved.yaml())
        return resolved.recipe.data.template_date

    assert day("target", "2026-07-01") == "2026-07-01"
    assert day("target", "2026-08-01") == "2026-07-01"
    assert day("target", "2026-08-01", resume="never") == "2026-08-01"
    assert day("target", "2026-08-02", ("data.template_date", "2020-01-01")) == "2020-01-01"
    KINDS["Gemma"].tokenizer().save_pretrained(tmp_path / "plain")
    assert day("plain", "2026-08-03", resume="never") is None


@pytest.mark.parametrize("name", KINDS)
def test_ends_that_are_no_end_of_the_target(name: str) -> None:
    kind = KINDS[name]
    tokenizer = kind.tokenizer()
    end = re.findall(r"<[^<>]*>$", kind.written[-1])[0]
    number = tokenizer.convert_tokens_to_ids(end)
    assert endless_answers(tokenizer, [number]) is None
    warning = endless_answers(tokenizer, [5])
    assert warning is not None
    assert f"{end!r} ({number})" in warning


def test_answers_that_training_would_leave_out_end_the_run(tokenizer: PreTrainedTokenizerFast) -> None:
    """Eight in a row, with none that it would learn from; and before anything is asked, where no answer would do."""
    row = Placed("rows.jsonl", 1, read({"messages": ASK}))

    def answer(asker: Asker, text: str) -> dict[str, Any]:
        dialogue = asker.open(0, row)
        assert asker.ask(dialogue) is not None
        asker.hear(dialogue, Reply(text, 3, ended=True))
        return asker.entry(dialogue)

    asker = Asker(tokenizer, prompt_tokens=8, longest_prompt=100, keep_cut=False)
    for _ in range(FIRST - 1):
        assert answer(asker, "a<start_of_turn>b")["rejected"]["kind"] == "answer"
    with pytest.raises(DataError, match="every one of the first 8 answered rows"):
        answer(asker, "a<start_of_turn>b")
    fine = Asker(tokenizer, prompt_tokens=8, longest_prompt=100, keep_cut=False)
    assert "answer" in answer(fine, "yes")
    for _ in range(FIRST + 1):
        assert "rejected" in answer(fine, "a<start_of_turn>b")
    fine.rehearse([row], None)
    sure = KINDS["Gemma"].tokenizer()
    sure.chat_template = KINDS["Gemma"].template.replace(
        "<start_of_turn>model\n' -}}", "<start_of_turn>model\nSure' -}}"
    )
    with pytest.raises(DataError, match="the decoder's prompt reads"):
        Asker(sure, prompt_tokens=8, longest_prompt=100, keep_cut=False).rehearse([row], None)


def test_a_chat_that_calls_tools_is_answered_behind_their_results(tokenizer: PreTrainedTokenizerFast) -> None:
    kind = KINDS["Llama 3.1, tools and a date"]
    asker = Asker(kind.tokenizer(), prompt_tokens=8, longest_prompt=1000, keep_cut=False)
    dialogue = asker.open(0, Placed("rows.jsonl", 1, read(kind.row())))
    ask = asker.ask(dialogue)
    assert ask is not None
    assert '"parameters": {"town": "Ulm"}}<|eot_id|><|head|>ipython' in ask.text
    asker.hear(dialogue, Reply("there", 2, ended=True))
    call, result, answer = asker.entry(dialogue)["answer"]["messages"][1:]
    assert (call["train"], result["role"], answer["content"]) == (False, "tool", "there")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", {"content": "plain"}),
        ("<|channel|>final<|message|>x", {"content": "x"}),
        (
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary to=functions.look "
            '<|constrain|>json<|message|>{"a": 1}',
            {
                "content": "",
                "reasoning_content": "so",
                "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"a": 1}}}],
            },
        ),
    ],
)
def test_channels_become_fields(tokenizer: PreTrainedTokenizerFast, text: str, expected: dict[str, Any]) -> None:
    assert message_of(tokenizer, text, "why") == {"role": "assistant", **expected}
    assert message_of(tokenizer, "so</think>", "why<think>\n")["content"] == "<think>\nso</think>"


def test_prompts_keep_tools_results_and_system_turns(tmp_path: Path) -> None:
    """What an evaluation decodes is what training has in front of the same answers."""
    kind = KINDS["Llama 3.1, tools and a date"]
    tokenizer = kind.tokenizer()
    messages = [*kind.messages, say("system", "be brief"), say("user", "and"), say("assistant", "yes")]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(kind.row() | {"messages": messages, "category": None}) + "\n")
    (prompt,) = load_prompts(str(path))
    assert prompt.category == "all"
    template, chat = ChatTemplate(tokenizer, None), read(kind.row() | {"messages": messages})
    asked = [tokenizer.decode(render(prompt, tokenizer, answers=["?", "it is here"][:turn])) for turn in range(3)]
    assert asked == [template.prompt(chat, at) for at in (1, 3, 6)]
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        render(prompt, tokenizer)
