"""Edges of what is shared: what a card claims, what is private, what of others' answer files counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.launch.share import push
from draftsmith.launch.share.card import _claim, _rows
from draftsmith.launch.share.folder import Upload, private_words
from draftsmith.launch.share.spec_bench import Answered, _answered, _choice, _differing, _temperature


def row(tau: float | None = 2.0, **own: Any) -> dict[str, Any]:
    made = {"method": "m", "audited": "m", "verdict": "lossless", "tau": [tau, None, None], "flagged": False}
    return made | {"prompts": "stdlib"} | own


FEWER = "With it the target decoded in fewer calls"
PROVEN = "he audit found the text to be the target's own"


@pytest.mark.parametrize(
    ("rows", "claim"),
    [
        ([row(), row(1.01)], f"{FEWER}; t{PROVEN}."),
        ([row(), row(1.0)], f"T{PROVEN}."),
        ([row(1.0), row()], f"T{PROVEN}."),
        ([row(), row(None)], f"T{PROVEN}."),
        ([row(), row(flagged=True)], f"T{PROVEN}."),
        ([row(), row(verdict="not audited")], f"{FEWER}."),
        ([row(), row(audited="other")], f"{FEWER}."),
        ([row(1.0, verdict="lossy")], ""),
        ([], ""),
    ],
)
def test_a_card_claims_what_all_rows_show(rows: list[dict[str, Any]], claim: str) -> None:
    assert _claim(rows) == claim


def test_rows_of_the_drafter_that_goes_up_alone() -> None:
    results = {
        "draft": {"loaded": [{"method": "m"}]},
        "rows": [row(), row(method="lookup"), row(prompts="/a/b.jsonl")],
    }
    found = _rows(results)
    assert [(each["method"], each["source"]) for each in found] == [("m", "stdlib"), ("m", "b.jsonl")]


@pytest.mark.parametrize(("home", "private"), [("/", False), ("/root", False), ("/home/me", True)])
def test_a_path_that_any_text_may_hold_is_not_private(
    home: str, private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path(home))
    words = list(private_words(tmp_path / "run", "some/target"))
    assert (home in words) is private
    assert str((tmp_path / "run").resolve()) in words


def test_plain_decoding_takes_a_step_a_token() -> None:
    turns = [{"tokens": 3, "steps": [1, 1], "text": " a ", "seconds": 0.5}, {"tokens": 1, "steps": [], "text": "b"}]
    turns[1]["seconds"] = 0.25
    assert _choice(turns, plain=True)["decoding_steps"] == [3, 1]
    assert _choice(turns, plain=True)["accept_lengths"] == [1, 1, 1, 1]
    made = _choice(turns, plain=False)
    assert (made["decoding_steps"], made["accept_lengths"]) == ([2, 0], [1, 1])
    assert (made["turns"], made["new_tokens"], made["wall_time"]) == (["a", "b"], [3, 1], [0.5, 0.25])


@pytest.mark.parametrize(
    ("file", "model", "temperature"),
    [
        ("eagle-temperature-0.5", "eagle-temp-1.0", 1.0),
        ("eagle-temperature-0.5", "eagle", 0.5),
        ("eagle", "eagle-temperature-0", 0.0),
    ],
)
def test_the_model_states_its_temperature_before_the_file_does(file: str, model: str, temperature: float) -> None:
    assert _temperature(Path(f"{file}.jsonl"), model) == temperature


def test_a_step_may_have_accepted_nothing() -> None:
    choice: dict[str, Any] = {"turns": ["a"], "decoding_steps": [2], "new_tokens": [2], "wall_time": [1]}
    line = {"question_id": 1, "category": "qa", "model_id": "m", "choices": [{**choice, "accept_lengths": [2, 0]}]}
    assert _answered(line).steps_S == [2, 0]
    line["choices"] = [{**choice, "accept_lengths": [2, -1]}]
    with pytest.raises(ValueError, match="2 new_tokens in a wall_time of 1 s"):
        _answered(line)


def test_turns_that_differ_are_counted_one_by_one() -> None:
    def answered(number: int, *texts: str) -> Answered:
        return Answered(number, "qa", "m", list(texts), 2, 1.0, [1, 1])

    base = {1: answered(1, "a", "b"), 2: answered(2, "c"), 3: answered(3, "d")}
    assert _differing([answered(2, "c"), answered(1, "x", "y"), answered(3, "z")], base) == 3
    assert _differing([answered(1, "a", "b"), answered(2, "c")], base) == 0
    assert _differing([answered(1, "a"), answered(2, "c", "and")], base) == 2  # one turn is missing, one is none's


def test_a_push_removes_what_an_earlier_drafter_left_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[list[Any]] = []

    class Api:
        def __init__(self, **_where: Any) -> None: ...

        def create_commit(self, _name: str, operations: list[Any], **_how: Any) -> Any:
            commits.append(operations)
            return SimpleNamespace(oid="c0ffee")

    there = {"config.json", "old.safetensors", "member/config.json", "LICENSE", "picture.png", ".gitattributes"}
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(push, "_files_there", lambda *_, **__: there)
    said = push._send("me/drafter", Upload({"config.json": b"{}", "new.safetensors": b"1"}, [], []), private=False)
    assert [each.path_in_repo for each in commits[0]] == [
        "config.json",
        "new.safetensors",
        "member/config.json",
        "old.safetensors",
    ]
    assert "(removed: member/config.json, old.safetensors)" in said
    assert "hub:me/drafter@c0ffee" in said
