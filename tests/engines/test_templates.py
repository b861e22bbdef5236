"""The chat templates of released models that llama.cpp's source holds: what is learnt of a chat, whatever writes it.

Nobody has written down here what each of them does; what has to hold for all is that an answer is learnt once, with
its own words and thoughts and nobody else's, between no tags that are doubled, and that what is not so is counted.
Read next: `data/rows/test_answers_by_template.py`, whose templates are short ones of each kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.rows.chats.turns import Pieces, pieces_of
from draftsmith.data.rows.raw import BadRow
from draftsmith.data.rows.shapes import Chat, parse
from draftsmith.data.rows.templates import ChatTemplate
from draftsmith.data.rows.tokenizer import train_tokenizer
from engines.engine import NEEDED, PLACE
from helpers.models.chat_templates import say
from transformers import PreTrainedTokenizerFast

pytestmark = NEEDED
FOLDER = Path(PLACE) / "llama.cpp" / "models" / "templates"
FILES = sorted(FOLDER.glob("*.jinja"))
VALUES: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"thinking": True},
    {"thinking": False},
)
TOKEN = re.compile(r"<[^<>\s'\"{}]+>|\[/?[A-Z_]+\]")
TAGS = re.compile(r"<(?:seed:)?think>|\[THINK\]|<\|START_THINKING\|>")
CLOSING = re.compile(r"</(?:seed:)?think>|\[/THINK\]|<\|END_THINKING\|>")
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"town": "Ulm"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
RESULT = say("tool", "HERE", tool_call_id="abcdefghi", name="look")
WHY, AND = say("user", "WHY?"), say("user", "AND?")
WORDS = ("WHY", "AND", "HERE", "DOG", "FOX", "THOUGHT-A", "THOUGHT-B")
ROWS: dict[str, list[dict[str, Any]]] = {
    "plain": [WHY, say("assistant", "DOG."), AND, say("assistant", "FOX.")],
    "thoughts apart": [
        WHY,
        say("assistant", "DOG.", reasoning_content="THOUGHT-A."),
        AND,
        say("assistant", "FOX.", reasoning_content="THOUGHT-B."),
    ],
    "thoughts inside": [
        WHY,
        say("assistant", "<think>\nTHOUGHT-A.\n</think>\n\nDOG."),
        AND,
        say("assistant", "<think>\nTHOUGHT-B.\n</think>\n\nFOX."),
    ],
    "an empty pair": [WHY, say("assistant", "<think>\n\n</think>\n\nDOG.")],
    "a call": [WHY, say("assistant", "", tool_calls=[CALL]), RESULT, say("assistant", "FOX.")],
    "a thoughtful call": [
        WHY,
        say("assistant", "", reasoning_content="THOUGHT-A.", tool_calls=[CALL]),
        RESULT,
        say("assistant", "FOX.", reasoning_content="THOUGHT-B."),
    ],
}


@cache
def tokenizer_of(file: Path) -> PreTrainedTokenizerFast:
    """A small one with the tokens that a template names; its end is what stands behind an answer first."""
    source = file.read_text(encoding="utf-8")
    tokenizer = train_tokenizer(["the quick brown fox asks and a lazy dog answers\n"] * 20, 400)
    named = sorted({*TOKEN.findall(source), "</s>", "<s>"})
    tokenizer.add_special_tokens({"additional_special_tokens": named, "bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = source
    try:
        asked = Chat([WHY, say("assistant", "DOG."), AND])
        behind = ChatTemplate(tokenizer, None, None, "2026-07-01").write(asked).partition("DOG.")[2]
    except BadRow:
        return tokenizer
    ends = [each for each in TOKEN.findall(behind) if "RESPONSE" not in each and "TEXT" not in each]
    tokenizer.eos_token = ends[0] if ends else "</s>"
    return tokenizer


def faults(row: list[dict[str, Any]], found: Pieces) -> Iterator[str]:
    """What does not hold of what is learnt of a row."""
    learnt: dict[int, list[str]] = {}
    for piece in found.texts:
        assert piece.spans is not None
        for (start, end), turn in zip(piece.spans, piece.turns, strict=True):
            learnt.setdefault(turn, []).append(piece.text[start:end])
    for at, turn in enumerate(row):
        if turn["role"] != "assistant":
            continue
        texts, own = learnt.get(at, []), json.dumps(turn)
        if len(texts) != 1 and not (found.notes and not texts):
            yield f"turn {at} is learnt {len(texts)} times"
        for text in texts:
            counts = {word: text.count(word) for word in WORDS}
            if any(count and word not in own for word, count in counts.items()):
                yield f"words of others: {text!r}"
            if any(count > 1 or (word in own and not count and not found.notes) for word, count in counts.items()):
                yield f"its words: {text!r}"
            if max(len(TAGS.findall(text)), len(CLOSING.findall(text))) > 1:
                yield f"tags: {text!r}"


@pytest.mark.parametrize("file", FILES, ids=[each.stem for each in FILES])
def test_an_answer_is_learnt_once_as_it_is(file: Path) -> None:
    tokenizer = tokenizer_of(file)
    read = 0
    for values in VALUES:
        if not all(re.search(rf"\b{name}\b", str(tokenizer.chat_template)) for name in values):
            continue
        template = ChatTemplate(tokenizer, None, values, "2026-07-01")
        for name, row in ROWS.items():
            tools = {"tools": TOOLS} if "call" in name else {}
            try:
                chat = parse({"messages": row} | tools, "messages")
                assert isinstance(chat, Chat)
                found = pieces_of(template, chat, "assistant")
            except BadRow:
                continue  # it takes no such chat, and says so
            read += 1
            assert list(faults(row, found)) == [], (name, values)
    if not read:
        pytest.skip("it takes none of these chats")
