"""Edges of what becomes of a row's tokens: its length, its ids, its answers, its key; of a tokenizer of ten letters."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draftsmith.data.config import DataConfig
from draftsmith.data.rows import cache, encode
from draftsmith.data.rows.chats.written import Turn
from draftsmith.data.rows.encode import Encoder, _straddles, plain_prompt
from draftsmith.data.rows.raw import BadRow
from draftsmith.data.rows.shapes import Chat, Tokens


class Letters:
    """Ids 0 to 9 are the letters a to j."""

    def __len__(self) -> int:
        return 10


def encoder(**config: Any) -> Encoder:
    nothing: Any = None
    tokenizer: Any = Letters()
    settings: Any = SimpleNamespace(**{"sequence_length": 4, "loss_on": "answers", **config})
    return Encoder(tokenizer, settings, nothing, nothing, [], nothing)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("count", "cut"), [(3, False), (4, False), (5, True)])
def test_what_is_longer_than_a_row_is_cut_where_it_is_masked(count: int, cut: bool, masked: bool) -> None:
    """A text goes on in further rows, and counts as cut all the same."""
    (made,) = encoder()([Tokens([1] * count, [True] * count if masked else None)])
    assert not isinstance(made, BadRow)
    assert made.cut is cut
    assert len(made.document.ids) == (min(count, 4) if masked else count)


@pytest.mark.parametrize(
    ("ids", "said"), [([0, 9], None), ([9, 10], r"\[1\] is 10; .* are 0 to 9"), ([-1, 3], r"\[0\] is -1; ")]
)
def test_ids_that_the_tokenizer_does_not_have(ids: list[int], said: str | None) -> None:
    (made,) = encoder()([Tokens(ids)])
    assert isinstance(made, BadRow) is (said is not None)
    if said is not None:
        with pytest.raises(BadRow, match=said):
            raise made  # type: ignore[misc]


def test_a_token_straddles_where_an_answer_begins_inside_of_it() -> None:
    offset_T2 = np.array([[0, 2], [2, 5], [5, 6]])
    assert [_straddles(offset_T2, boundary) for boundary in range(7)] == [0, 1, 0, 1, 1, 0, 0]


def test_without_a_template_an_empty_line_stands_between_system_text_and_question() -> None:
    assert plain_prompt(["s", "q"]) == "s\n\nq"
    assert plain_prompt(["q"]) == "q"


@pytest.mark.parametrize(("loss_on", "cut", "answers"), [("answers", 1, 2), ("last", 0, 1)])
def test_cut_answers_are_counted_among_those_that_are_learnt(
    loss_on: str, cut: int, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two answers that came in ids the first was cut off."""
    monkeypatch.setattr(encode, "text_of", lambda _tokenizer, ids: "".join("abcdefghij"[each] for each in ids))
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, ("a", "bc", "d", "e"), strict=True)]
    turns = [Turn(1, [0], [1, 2], ended=False), Turn(3, [0, 1, 2, 3], [4, 9], ended=True)]
    made = encoder(loss_on=loss_on, sequence_length=9)._as_written(Chat(messages), turns)
    assert (made.notes.get("cut", 0), made.answers) == (cut, answers)
    assert made.document.ids.tolist() == [0, 1, 2, 3, 4, 9]
    assert made.document.in_loss.tolist() == [False, loss_on == "answers", loss_on == "answers", False, True, True]


@pytest.fixture
def key_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The key of rows under another Python, and what it is a hash of."""
    hashed: list[dict[str, Any]] = []
    dumps = json.dumps

    def noted(value: Any, **how: Any) -> str:
        hashed.append(value)
        return dumps(value, **how)

    def made(python: tuple[int, ...] = (3, 11, 0), **config: Any) -> tuple[str, dict[str, Any]]:
        tokenizer: Any = SimpleNamespace(name_or_path="", eos_token_id=9)
        monkeypatch.setattr(cache, "sys", SimpleNamespace(version_info=python))
        return cache.make_key(DataConfig(**config), tokenizer, ["a"]), hashed[-1]

    monkeypatch.setattr(cache, "tokenizer_hash", lambda _: "letters")
    monkeypatch.setattr(cache, "generation_ends", lambda _: [9])
    monkeypatch.setattr(cache.json, "dumps", noted)
    return made


def test_rows_are_made_anew_by_another_minor_version_of_python(key_of: Any) -> None:
    keys = [key_of(python)[0] for python in ((3, 11, 0), (3, 11, 9), (3, 12, 0))]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("control_tokens", "reject_rows"),
        ("train_rows", 5),
        ("template_values", {"thinking": True}),
        ("template_date", "2026-01-31"),
    ],
)
def test_keys_from_before_there_was_a_field_hold(name: str, value: Any, key_of: Any) -> None:
    """A default says nothing that they did not."""
    plain, shaped_by = key_of()
    assert name not in shaped_by["config"]
    other, shaped_by = key_of(**{name: value})
    assert shaped_by["config"][name] == value
    assert other != plain
