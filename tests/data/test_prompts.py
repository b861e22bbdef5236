"""Prompt sets in every format that is read, and how they become token ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftsmith.data.prompts import Prompt, load_prompts, render
from draftsmith.decoding.loading import load_tokenizer
from draftsmith.errors import DataError, RequestError

SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Compose a post", "Shorter"]}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": ""}
ROWS = [
    (SPEC_BENCH, Prompt("81", "writing", ("Compose a post", "Shorter"), chat=True)),
    (HUMANEVAL, Prompt("HumanEval/0", "humaneval", ("def f():\n",), chat=False)),
    (
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
                      {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]},
        Prompt("1", "all", ("a", "b"), chat=True, system="s"),
    ),
    ({"conversations": [{"from": "human", "value": "a"}]}, Prompt("1", "all", ("a",), chat=True)),
    ({"prompt": "a", "category": "qa"}, Prompt("1", "qa", ("a",), chat=True)),
    ({"instruction": "a", "input": "b"}, Prompt("1", "all", ("a\nb",), chat=True)),
    ({"text": "a"}, Prompt("1", "all", ("a",), chat=False)),
]  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), ROWS)
def test_formats(row: dict, expected: Prompt, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert load_prompts(str(path)) == [expected]


@pytest.mark.parametrize(
    ("line", "reason"),
    [("{", "not JSON"), ('{"turns": []}', "turns is"), ('{"a": 1}', "no prompt"), ("3", "a number"),
     ('{"prompt": " "}', "prompt is empty"), ("", "holds no prompt")],
)  # fmt: skip
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
    assert first == (
        "<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    )
    second = tokenizer.decode(render(prompt, tokenizer, answers=["no"]))
    assert second.startswith(first + "no<|endoftext|>\n<|im_start|>user\nand then")
    ids = render(prompt, tokenizer)
    assert render(prompt, tokenizer, limit=5) == ids[-5:]
    tokenizer.chat_template = None
    assert tokenizer.decode(render(prompt, tokenizer, answers=["no"])) == "whynoand then"


def test_prompts_of_held_out_files() -> None:
    prompts = load_prompts("stdlib")
    assert len(prompts) >= 24
    assert all(len(prompt.turns[0]) > 100 for prompt in prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
