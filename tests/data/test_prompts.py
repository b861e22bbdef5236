"""Prompt sets in every format that is read, and how they become token ids."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
from draftsmith.data.prompts import SECOND, Prompt, fitting, load_prompts, render, second_set
from draftsmith.data.rows.sources import split_of, stdlib_texts
from draftsmith.data.rows.templates import named_template
from draftsmith.decoding.backbone.hub import embedded_target, load_tokenizer
from draftsmith.errors import DataError, RequestError
from draftsmith.launch.check.check import _prompts
from draftsmith.launch.check.models import Models
from draftsmith.launch.recipe.load import load_recipe

SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Compose a post", "Shorter"]}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": ""}
ROWS = [
    (SPEC_BENCH, Prompt("81", "writing", ("Compose a post", "Shorter"), chat=True)),
    (HUMANEVAL, Prompt("HumanEval/0", "humaneval", ("def f():\n",), chat=False)),
    (
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "x"},
                {"role": "user", "content": "b"},
            ]
        },
        Prompt("1", "all", ("a", "b"), chat=True, system="s"),
    ),
    ({"conversations": [{"from": "human", "value": "a"}]}, Prompt("1", "all", ("a",), chat=True)),
    ({"prompt": "a", "category": "qa"}, Prompt("1", "qa", ("a",), chat=True)),
    ({"instruction": "a", "input": "b"}, Prompt("1", "all", ("a\nb",), chat=True)),
    ({"text": "a"}, Prompt("1", "all", ("a",), chat=False)),
    # as the sets that papers report come from their hubs
    ({"prompt": ["a", "b"], "prompt_id": 7, "category": "qa"}, Prompt("1", "qa", ("a", "b"), chat=True)),
    ({"question": "a", "answer": "#### 1"}, Prompt("1", "all", ("a",), chat=True)),
    ({"question": "a", "answer": ["b"], "text": None}, Prompt("1", "all", ("a",), chat=True)),
    ({"problem": "a", "subject": "Algebra", "unique_id": "t/1"}, Prompt("1", "Algebra", ("a",), chat=True)),
    ({"ID": "2024-I-1", "Problem": "a", "Answer": 1}, Prompt("1", "all", ("a",), chat=True)),
    ({"task_id": 11, "prompt": "a", "code": "b", "test_list": ["c"]}, Prompt("11", "all", ("a",), chat=True)),
    ({"task_id": 11, "text": "a", "code": "b", "test_list": ["c"]}, Prompt("11", "all", ("a",), chat=True)),
    ({"instruction": "a", "input": "", "output": "b", "text": "a b"}, Prompt("1", "all", ("a",), chat=True)),
    (
        {"question_id": "x_a", "question_title": "t", "question_content": "a", "starter_code": "b"},
        Prompt("x_a", "all", ("a",), chat=True),
    ),
    (
        {"id": "f0", "article": "a", "highlights": "b"},
        Prompt("f0", "all", ("Summarize the following article.\n\na",), chat=True),
    ),
]


def test_the_second_set_is_of_other_text() -> None:
    """Other stretches of files that neither training nor validation reads, an answer's length apart at least."""
    first, second = load_prompts("stdlib"), load_prompts(SECOND)
    assert len(first) >= 24
    assert len(second) >= 18
    sources = dict(stdlib_texts("prompts"))
    starts: dict[str, list[tuple[int, int]]] = {}
    for each in (*first, *second):
        module, _, cut = each.id.partition("@")
        assert split_of(module) == "prompts"
        text = each.turns[0]
        assert sources[module][int(cut) - len(text) : int(cut)] == text
        starts.setdefault(module, []).append((int(cut) - len(text), int(cut)))
    for module in {each.id.split("@")[0] for each in second}:
        stretches = sorted(starts[module])
        assert len(stretches) == 5
        for (_, end), (start, _) in itertools.pairwise(stretches):
            assert start - end > 400, module


def test_a_second_set_has_no_prompt_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    first = load_prompts(str(path), limit=1)
    with pytest.raises(RequestError, match=r"1 of the 2 prompts of eval.second_prompts .* the first is 1"):
        second_set(str(path), first, limit=None, seed=0)
    (tmp_path / "other.jsonl").write_text('{"prompt": "c"}\n')
    assert [each.turns for each in second_set(str(tmp_path / "other.jsonl"), first, limit=4, seed=0)] == [("c",)]


@pytest.mark.parametrize(("row", "expected"), ROWS)
def test_formats(row: dict, expected: Prompt, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert load_prompts(str(path)) == [expected]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ('{"turns": []}', "turns is"),
        ('{"turns": {"a": 1}}', "turns is an object"),
        ('{"turns": ' + "[" * 700 + "]" * 700 + "}", r"turns\[0\] is a list; expected text"),
        ('{"text": "a", "category": "\\ud800"}', "category is not valid Unicode"),
        ('{"text": "a", "id": "\\ud800"}', "name is not valid Unicode"),
        ('{"\\ud800": 1}', r"keys \\ud800 are no prompt"),
        ('{"a": 1}', "no prompt"),
        ("3", "a number"),
        ('{"prompt": " "}', "prompt is empty"),
        ('{"prompt": ["a", 3]}', r"prompt\[0\] is text; expected an object"),
        ('{"prompt": ["a", " "]}', r"prompt\[1\] is empty"),
        ('{"question": "a", "problem": "b"}', "question and problem may each be the prompt; expected one of them"),
        ('{"text": "a", "question": "b"}', "text and question may each be the prompt"),
        ('{"question": "a", "article": "b"}', "question and article may each be the prompt"),
        ('{"problem": null}', "problem is null; expected text"),
        ("", "holds no prompt"),
    ],
)
def test_a_bad_line_is_named(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(DataError, match=reason):
        load_prompts(str(path))
    with pytest.raises(RequestError, match="no prompt file"):
        load_prompts(str(tmp_path / "other.jsonl"))


def test_a_limit_takes_an_even_spread(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"text": "{n}"}}\n' for n in range(100)))
    taken = [int(prompt.turns[0]) for prompt in load_prompts(str(path), limit=5)]
    assert taken == [0, 20, 40, 60, 80]


def test_turns_are_rendered_with_the_answers_given(chat_tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(chat_tokenizer_folder))
    prompt = Prompt("1", "all", ("why", "and then"), chat=True, system="brief")
    first = tokenizer.decode(render(prompt, tokenizer))
    assert first == ("<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n")
    second = tokenizer.decode(render(prompt, tokenizer, answers=["no"]))
    assert second.startswith(first + "no<|endoftext|>\n<|im_start|>user\nand then")
    assert render(prompt, tokenizer, limit=5) == render(prompt, tokenizer)  # with its beginning
    tokenizer.chat_template = None
    ids = render(prompt, tokenizer, answers=["no"])
    assert tokenizer.decode(ids) == "brief\n\nwhynoand then"
    assert render(prompt, tokenizer, answers=["no"], limit=5) == ids[-5:]


CHATS = [Prompt(str(n), "all", ("why " * n,), chat=True) for n in (1, 5, 500)]
TEXT = Prompt("text", "all", ("why " * 500,), chat=False)


def test_a_template_that_writes_nothing_is_refused(chat_tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(chat_tokenizer_folder))
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(DataError, match=r"template writes prompt 7 \(qa\) as nothing, not a token"):
        render(Prompt("7", "qa", ("a",), chat=True), tokenizer)


def test_longer_chats_are_left_out(chat_tokenizer_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Texts stay, as they are cut; where nothing stays, the message says what would do."""
    tokenizer = load_tokenizer(str(chat_tokenizer_folder))
    short, middle, long = (len(render(each, tokenizer)) for each in CHATS)
    assert fitting([*CHATS, TEXT], tokenizer, middle) == [*CHATS[:2], TEXT]
    assert fitting([*CHATS, TEXT], tokenizer, middle - 1) == [CHATS[0], TEXT]
    assert not caplog.records
    fitting([*CHATS, TEXT], tokenizer, middle, warn=True)
    message = f"1 of 4 prompts are left out: chats longer than eval.prompt_tokens = {middle}; with --"
    assert message in caplog.text
    fitting(CHATS, tokenizer, long, warn=True)
    assert len(caplog.records) == 1
    message = f"all 3 prompts .* = {short - 1}: chats of {short} to {long} .*prompt_tokens {long}$"
    with pytest.raises(RequestError, match=message):
        fitting(CHATS, tokenizer, short - 1)
    assert fitting(CHATS, tokenizer, long) == CHATS


def test_the_pre_flight_counts_them(tmp_path: Path) -> None:
    """Of several turns the last one, with answers before it as long as they may be."""
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = named_template("chatml")
    tokenizer.save_pretrained(tmp_path)
    shutil.copy(Path(embedded_target()) / "config.json", tmp_path)
    rows = [{"prompt": each.turns[0]} for each in CHATS] + [{"text": TEXT.turns[0]}] * 2
    turns = ["why", "and then", "why not"]
    flags = {
        "target.path": str(tmp_path),
        "eval.prompts": str(tmp_path / "prompts.jsonl"),
        "eval.max_new_tokens": "30",
    }

    def prompts(most: int) -> str:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "prompts.jsonl").write_text(lines)
        more = [("eval.prompt_tokens", str(most))]
        recipe = load_recipe("distill-tiny", [*flags.items(), *more]).recipe
        return _prompts(recipe, Models(recipe))

    message = prompts(64)
    assert "the longest has 64 tokens; longer than eval.prompt_tokens = 64: 1 left out" in message
    assert "(chats), 2 cut to their end (texts)" in message
    rows = [{"turns": turns}]
    last = len(render(Prompt("1", "all", tuple(turns), chat=True), tokenizer, answers=["."] * 2))
    assert f"the longest has at most {last + 60} tokens" in prompts(500)
    assert "the longest has at most 64 tokens" in prompts(64)
    rows = [{"prompt": CHATS[2].turns[0]}]
    with pytest.raises(RequestError, match="all 1 prompts are longer"):
        prompts(64)


def test_prompts_of_held_out_files() -> None:
    prompts = load_prompts("stdlib")
    assert len(prompts) >= 24
    assert all(len(prompt.turns[0]) > 100 for prompt in prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def messages_of(tmp_path: Path, *messages: tuple[str, str]) -> Prompt:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in messages]}) + "\n")
    (prompt,) = load_prompts(str(path))
    return prompt


def test_turns_of_one_side_in_a_row_are_asked_as_they_are_trained_on(tmp_path: Path) -> None:
    """Both stand in front of the one answer that is asked for."""
    prompt = messages_of(tmp_path, ("user", "why"), ("user", "and then"), ("assistant", "so"))
    assert len(prompt.points) == 1
    assert [each["content"] for each in prompt.before(0)] == ["why", "and then"]
    by_turns = messages_of(tmp_path, ("user", "why"), ("assistant", "so"), ("user", "and then"))
    assert len(by_turns.points) == 2


def test_an_empty_system_text_is_a_system_text(tmp_path: Path, chat_tokenizer_folder: Path) -> None:
    """A template that writes one of its own where none is given does not write it; without a template it is nothing."""
    tokenizer = load_tokenizer(str(chat_tokenizer_folder))
    prompt = messages_of(tmp_path, ("system", ""), ("user", "why"))
    assert prompt.before(0)[0] == {"role": "system", "content": ""}
    assert tokenizer.decode(render(prompt, tokenizer)).startswith("<|im_start|>system\n<|im_end|>")
    tokenizer.chat_template = None
    assert tokenizer.decode(render(prompt, tokenizer)) == "why"
