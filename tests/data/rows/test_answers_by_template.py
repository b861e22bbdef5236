"""What a target writes turn by turn is what the trainer sees in the loss, for every kind of chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.config import DataConfig
from draftsmith.data.generate.answers import Asker, Reply
from draftsmith.data.prompts import Prompt, load_prompts, render
from draftsmith.data.rows.cache import Prepared
from draftsmith.data.rows.chats.spoken import Spoken, text_of
from draftsmith.data.rows.prepare import prepare
from draftsmith.data.rows.records import Placed
from draftsmith.data.rows.shapes import parse
from draftsmith.data.rows.templates import render_chat
from helpers.models.chat_templates import KINDS, Kind
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[3]
DAY = "2026-07-01"


def prepared(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, place: Path, **config: Any) -> Prepared:
    """Rows as for training; each is there twice, once to train on and once held out."""
    path = place / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"source": str(path), "validation": str(path), "cache": str(place / "cache"), "template_date": DAY}
    return prepare(DataConfig(**(settings | config)), tokenizer, out=None)


def learnt(rows: Prepared) -> list[list[list[int]]]:
    """Of every document, as `inspect` shows it, its stretches of labels in the loss."""
    batch = rows.train.batch(range(len(rows.train)))
    documents: dict[tuple[int, int], list[list[int]]] = {}
    for row in range(len(rows.train)):
        inside = False
        columns = (batch[name][row].tolist() for name in ("input_ids", "loss_mask", "documents"))
        for token, counts, number in zip(*columns, strict=True):
            stretches = documents.setdefault((row, number), [])
            if counts:
                stretches[-1].append(token) if inside else stretches.append([token])
            inside = counts
    return [stretches for stretches in documents.values() if stretches]


def answered(kind: Kind, tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, Any], list[list[int]], list[Spoken]]:
    """The row that `generate` writes when the target writes what it does, the prompts, and both in ids."""
    config = DataConfig(template_values=kind.values, template_date=DAY)
    asker = Asker(tokenizer, prompt_tokens=8, longest_prompt=10_000, keep_cut=False, data=config)
    dialogue = asker.open(0, Placed("rows.jsonl", 1, parse(kind.row(), "messages")))
    calls = [bool(each.get("tool_calls")) for each in kind.messages if each["role"] == "assistant"]
    spoken = []
    for text in (text for text, call in zip(kind.written, calls, strict=True) if not call):
        ask = asker.ask(dialogue)
        assert ask is not None, dialogue.no_answer
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        asker.hear(dialogue, Reply(text_of(tokenizer, ids[:-1]), len(ids), True, ids))
        spoken.append(Spoken(ask.ids, ids, True))
    entry = asker.entry(dialogue)
    assert "answer" in entry, entry
    return entry["answer"], [each.prompt for each in spoken], spoken


@pytest.mark.parametrize("name", KINDS)
def test_text_is_learnt_as_the_target_writes_it(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    tokenizer = kind.tokenizer()
    rows = prepared([kind.row()], tokenizer, tmp_path, template_values=kind.values)
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in kind.written]
    found = learnt(rows)
    assert sorted(part for document in found for part in document) == sorted(expected)
    assert len(found) == kind.documents
    assert rows.report.rejected == 0
    assert rows.report.notes == {}


@pytest.mark.parametrize("name", KINDS)
def test_generated_rows_are_learnt_in_the_ids_that_were_written(name: str, tmp_path: Path) -> None:
    """Their prompts are those of the decoder, and of an evaluation's later turns."""
    kind = KINDS[name]
    tokenizer = kind.tokenizer()
    row, prompts, spoken = answered(kind, tokenizer)
    rows = prepared([row], tokenizer, tmp_path, template_values=kind.values)
    assert rows.report.rows_by_ids == 2
    found = learnt(rows)
    assert sorted(part for document in found for part in document) == sorted(each.answer for each in spoken)
    (tmp_path / "prompts.jsonl").write_text(json.dumps(kind.row()) + "\n")
    config = DataConfig(template_values=kind.values, template_date=DAY)
    (prompt,) = load_prompts(str(tmp_path / "prompts.jsonl"), data=config)
    asked = [render(prompt, tokenizer, answers=_before(prompt, turn, spoken)) for turn in range(len(prompt.points))]
    assert [each for each in asked if each in prompts] == prompts
    whole = [turn.prompt + turn.answer for turn in spoken]
    documents = [ids[document >= 0].tolist() for ids, document in zip(rows.train.ids_RS, rows.train.document_RS)]
    assert all(any(_holds(document, each) for document in documents) for each in whole)


def _before(prompt: Prompt, turn: int, spoken: list[Spoken]) -> list[Spoken]:
    """Answers to the turns asked before; whatever a call's turn is answered with, the given call stands there."""
    calls = [at < len(prompt.messages) and prompt.messages[at] is not None for at in prompt.points[:turn]]
    own = iter(spoken)
    return [spoken[0] if call else next(own) for call in calls] if prompt.tools else spoken[:turn]


def _holds(ids: list[int], part: list[int]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids)))


def test_a_generated_row_has_channels_as_fields() -> None:
    """Its text too is what was written: special tokens inside an answer are read, not dropped."""
    kind = KINDS["gpt-oss"]
    row, _, _ = answered(kind, kind.tokenizer())
    turns = [(each["reasoning_content"], each["content"]) for each in row["messages"][1::2]]
    assert turns == [("so", "the dog"), ("no", "a fox")]


@pytest.mark.parametrize("name", ["Qwen3, thinking", "gpt-oss"])
def test_another_template_takes_what_it_would_change_out_of_the_loss(name: str, tmp_path: Path) -> None:
    """The same tokenizer, and a template that writes the answers in other tokens: none of them is learnt."""
    kind = KINDS[name]
    row, _, _ = answered(kind, kind.tokenizer())
    other = kind.tokenizer()
    other.chat_template = kind.template.replace("'<think>\n' +", "'<think>\n ' +").replace("final", "commentary")
    row["messages"].append({"role": "user", "content": "so"})
    row["messages"].append({"role": "assistant", "content": "lazy"})
    rows = prepared([row], other, tmp_path)
    assert rows.report.rows_by_ids == 0
    assert rows.report.notes["other tokens"] == 4
    ids = [part for document in learnt(rows) for part in document]
    assert len(ids) == 1
    assert "lazy" in other.decode(ids[0])


def table() -> list[str]:
    """The table of docs/data.md."""
    lines = ["| template | prompts end with | what it does | answers, documents |", "|---|---|---|---|"]
    for name, kind in KINDS.items():
        told = {"tools": kind.tools, "values": kind.values, "day": DAY}
        without, with_ = (
            render_chat(kind.tokenizer(), kind.messages[:2], answer_next=each, **told) for each in (False, True)
        )
        end = json.dumps(with_.removeprefix(without), ensure_ascii=False).strip('"').replace("|", "\\|")
        lines.append(
            f"| {name} | {f'`{end}`' if end else 'the turn in front'} | {kind.what} | {len(kind.written)}, {kind.documents} |"
        )
    return lines


def test_the_table_of_the_page_is_what_happens() -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page
