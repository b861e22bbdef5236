"""Rows answered anew: what is asked, what is written, what is refused; the folder that keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from draftsmith.data.generate.answers import Asker, Dialogue, Reply
from draftsmith.data.generate.journal import Journal
from draftsmith.data.rows.readers import Rejected
from draftsmith.data.rows.records import Placed
from draftsmith.data.rows.shapes import find_shape, parse
from draftsmith.errors import DataError, EnvironmentFailure, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def tokenizer(chat_tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    from draftsmith.decoding.target.hub import load_tokenizer

    return load_tokenizer(str(chat_tokenizer_folder))


@pytest.fixture
def asker(tokenizer: PreTrainedTokenizerBase) -> Asker:
    return Asker(tokenizer, prompt_tokens=8, longest_prompt=100, keep_cut=False)


def placed(row: dict[str, Any]) -> Placed:
    shape = find_shape(row)
    assert shape is not None
    return Placed("rows.jsonl", 7, parse(row, shape))


def chat(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns], **more}


def talk(asker: Asker, row: dict[str, Any], *answers: Reply | str) -> tuple[Dialogue, list[str]]:
    """A dialogue with these answers, and the prompts that it asked with."""
    dialogue, prompts = asker.open(0, placed(row)), []
    for answer in answers:
        ask = asker.ask(dialogue)
        if ask is None:
            break
        prompts.append(asker.tokenizer.decode(ask.ids))
        asker.hear(dialogue, Reply(answer, 3, ended=True) if isinstance(answer, str) else answer)
    return dialogue, prompts


def test_every_turn_is_asked_with_the_targets_own_answers_before_it(asker: Asker) -> None:
    row = chat(
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "OLD"),
        ("user", "two"),
        ("assistant", "OLD TOO"),
        ("user", "three"),
        tools=[{"name": "look"}],
    )
    dialogue, prompts = talk(asker, row, "first", "second")
    assert not dialogue.talking
    start = '<|im_start|>system\nTools:\n[{"name": "look"}]<|im_end|>\n<|im_start|>system\nbe brief<|im_end|>\n'
    one = f"{start}<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    two = f"{one}first<|endoftext|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert prompts == [one, two]
    entry = asker.entry(dialogue)
    assert entry["answer"] == chat(
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "first"),
        ("user", "two"),
        ("assistant", "second"),
        ("user", "three"),
        tools=[{"name": "look"}],
    )
    assert (entry["turns"], entry["tokens"], entry["cut"]) == (2, 6, 0)


def test_an_opening_word_of_the_assistant_is_left_out(asker: Asker) -> None:
    row = chat(("assistant", "hello!"), ("user", "one"), ("assistant", "OLD"))
    dialogue, prompts = talk(asker, row, "new")
    assert "hello" not in prompts[0]
    assert asker.entry(dialogue)["answer"] == chat(("user", "one"), ("assistant", "new"))


@pytest.mark.parametrize(
    "row", [{"prompt": "one", "completion": "OLD"}, {"instruction": "one", "input": "", "output": "OLD"}]
)
def test_prompt_and_completion_stay_a_pair(asker: Asker, row: dict[str, Any]) -> None:
    dialogue, _ = talk(asker, row, "new")
    entry = asker.entry(dialogue)
    assert entry["shape"] == "prompt_completion"
    assert entry["answer"] == {"prompt": "one", "completion": "new"}


def test_a_text_becomes_token_ids_with_the_mask_of_the_answer(asker: Asker) -> None:
    text = "the quick brown fox asks, and a lazy dog answers: yes, no, perhaps"
    ids = asker.tokenizer(text)["input_ids"]
    said = Reply("yes", 2, ended=False, ids=[300, 301])
    dialogue, prompts = talk(asker, {"text": text}, said)
    assert prompts == [asker.tokenizer.decode(ids[:8])]
    entry = asker.entry(dialogue)
    assert entry["shape"] == "tokens"
    assert entry["answer"] == {"input_ids": [*ids[:8], 300, 301], "loss_mask": [0] * 8 + [1, 1]}


@pytest.mark.parametrize("ended", [True, False])
def test_a_servers_answer_to_a_text_is_tokenised_here(asker: Asker, ended: bool) -> None:
    dialogue, _ = talk(asker, {"text": "the fox"}, Reply(" yes", 2, ended=ended))
    row = asker.entry(dialogue)["answer"]
    prompt, said = (asker.tokenizer(text)["input_ids"] for text in ("the fox", " yes"))
    assert row["input_ids"] == prompt + said + [asker.tokenizer.eos_token_id] * ended
    assert row["loss_mask"] == [0] * len(prompt) + [1] * (len(said) + ended)


def test_a_prompt_never_ends_inside_a_character(asker: Asker) -> None:
    """Eight tokens of a byte-level tokenizer end in the middle of the third sign."""
    dialogue, prompts = talk(asker, {"text": "漢字漢字"}, "yes")
    assert prompts == ["漢字"]
    assert asker.entry(dialogue)["answer"]["loss_mask"][:7] == [0] * 6 + [1]


def test_token_ids_with_one_answer(asker: Asker) -> None:
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    dialogue, _ = talk(asker, row, Reply("yes", 1, ended=True, ids=[9, 0]))
    assert asker.entry(dialogue)["answer"] == {"input_ids": [5, 6, 9, 0], "loss_mask": [0, 0, 1, 1]}


def test_thoughts_of_a_server_are_kept_apart(asker: Asker) -> None:
    reply = Reply("new", 3, ended=True, reasoning="hm")
    dialogue, _ = talk(asker, {"prompt": "one", "completion": "OLD"}, reply)
    entry = asker.entry(dialogue)
    assert entry["shape"] == "messages"
    assert entry["answer"]["messages"][1] == {"role": "assistant", "content": "new", "reasoning_content": "hm"}


ASK = chat(("user", "one"), ("assistant", "OLD"))
TWICE = chat(("user", "one"), ("assistant", "OLD"), ("user", "two"), ("assistant", "OLD"))
CALLS = {
    "messages": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "tool_calls": [{"name": "look"}]},
        {"role": "tool", "content": "seen"},
        {"role": "assistant", "content": "OLD"},
    ]
}
REFUSED = [
    (ASK, [" \n"], "empty", "the answer is empty"),
    (ASK, [Reply("new", 9, ended=False)], "cut", "the answer was cut off after 9 tokens"),
    (TWICE, ["new", Reply("n", 9, ended=False)], "cut", "turn 4: the answer was cut off after 9"),
    (ASK, ["new \ufffd"], "answer", "no UTF-8 text"),
    (ASK, ["new \0"], "answer", "training could not read it: the content of messages[1] contains"),
    (chat(("user", "x" * 400), ("assistant", "OLD")), [], "prompt", "target has room for 100"),
    (CALLS, [], "source", "turn 2 calls a tool"),
    (chat(("assistant", "hello!"), ("user", "one")), [], "source", "no assistant turn stands"),
    ({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}, [], "source", "has 2 answers"),
    ({"input_ids": [5, 6, 7, 8], "loss_mask": [1, 1, 1, 1]}, [], "source", "behind a prompt"),
]


@pytest.mark.parametrize(("row", "answers", "kind", "reason"), REFUSED)
def test_rows_that_are_left_out(
    asker: Asker, row: dict[str, Any], answers: list[Reply | str], kind: str, reason: str
) -> None:
    dialogue, _ = talk(asker, row, *answers)
    if not answers and dialogue.talking:
        assert asker.ask(dialogue) is None
    entry = asker.entry(dialogue)
    assert "answer" not in entry
    rejected = entry["rejected"]
    assert (rejected["file"], rejected["line"], rejected["kind"]) == ("rows.jsonl", 7, kind)
    assert reason in rejected["reason"]


def test_a_row_rejected_while_reading_keeps_its_reason(asker: Asker) -> None:
    dialogue = asker.open(3, Rejected("rows.jsonl", 4, "not JSON (why)"))
    assert not dialogue.talking
    assert asker.entry(dialogue) == {
        "row": 3,
        "rejected": {"file": "rows.jsonl", "line": 4, "reason": "not JSON (why)", "kind": "source"},
    }


def test_cut_answers_may_be_kept(tokenizer: PreTrainedTokenizerBase) -> None:
    asker = Asker(tokenizer, prompt_tokens=8, longest_prompt=100, keep_cut=True)
    dialogue, _ = talk(asker, ASK, Reply("new", 9, ended=False))
    entry = asker.entry(dialogue)
    assert entry["cut"] == 1
    assert entry["answer"] == chat(("user", "one"), ("assistant", "new"))


def test_answers_that_tokenise_differently_are_counted(asker: Asker) -> None:
    """Trained on, such a text has other labels than the tokens that the target wrote."""
    whole = asker.tokenizer("the fox")["input_ids"]
    letters = [each for letter in "the fox" for each in asker.tokenizer(letter)["input_ids"]]
    assert len(letters) > len(whole)
    for ids, differs in ((whole, 0), (letters, 1)):
        dialogue, _ = talk(asker, ASK, Reply("the fox", len(ids) + 1, ended=True, ids=[*ids, 0]))
        assert asker.entry(dialogue)["retokenised"] == differs


def test_a_chat_needs_a_template(tokenizer: PreTrainedTokenizerBase) -> None:
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    asker = Asker(bare, prompt_tokens=8, longest_prompt=100, keep_cut=False)
    with pytest.raises(RequestError, match="rows.jsonl:7 is a chat, but .* no chat template"):
        asker.open(0, placed(ASK))
    _, prompts = talk(asker, {"prompt": "one", "completion": "OLD"}, "new")
    assert prompts == ["one"]


def test_token_ids_that_cannot_travel_as_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Letters one by one: a server, given the text, would read other tokens."""
    asker = Asker(tokenizer, prompt_tokens=8, longest_prompt=100, keep_cut=False, text_prompts=True)
    ids = [each for letter in "the fox" for each in tokenizer(letter)["input_ids"]]
    dialogue = asker.open(0, placed({"input_ids": ids}))
    assert asker.ask(dialogue) is None
    assert "cannot be sent as text" in str(dialogue.no_answer)


SETTINGS = {"sampling": {"temperature": 0.0, "seed": 0}, "batch": 2}
SESSION = {"versions": {"torch": "1"}}


def answered(row: int, *, shape: str = "messages") -> dict[str, Any]:
    sums = dict.fromkeys(("turns", "cut", "retokenised", "steps", "emitted", "tested", "accepted"), 1)
    return {"row": row, "shape": shape, "answer": {"messages": [f"row {row} \u2028"]}, "tokens": 5, **sums}


def rejected(row: int) -> dict[str, Any]:
    reason = {"file": "rows.jsonl", "line": row + 1, "reason": "why", "kind": "cut"}
    return {"row": row, "rejected": reason}


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_files_are_in_the_order_of_the_source(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", SETTINGS, SESSION) as journal:
        journal.add([answered(3), rejected(1)])
        journal.add([])
        journal.add([answered(0), rejected(2)])
        manifest = journal.publish()
    folder = tmp_path / "out"
    assert sorted(path.name for path in folder.iterdir()) == ["answers.jsonl", "manifest.json", "rejected.jsonl"]
    assert [row["messages"][0][:5] for row in lines(folder / "answers.jsonl")] == ["row 0", "row 3"]
    assert [row["line"] for row in lines(folder / "rejected.jsonl")] == [2, 3]
    assert manifest == json.loads((folder / "manifest.json").read_text())
    assert manifest["rows"] == {"answered": 2, "rejected": 2, "rejected_by_kind": {"cut": 2}}
    assert manifest["answers"] == {"turns": 2, "tokens": 10, "cut": 2, "retokenised": 2}
    assert manifest["acceptance"] == {"tau": 1.0, "alpha": 1.0, "steps": 2, "verdict": "not audited"}


def test_rows_of_several_shapes_go_to_a_file_each(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", SETTINGS, SESSION) as journal:
        journal.add([answered(0), answered(1, shape="tokens"), answered(2)])
        journal.publish()
    found = {path.name: len(lines(path)) for path in (tmp_path / "out").glob("*.jsonl")}
    assert found == {"answers-messages.jsonl": 2, "answers-tokens.jsonl": 1}


def test_a_half_written_line_is_cut_off(tmp_path: Path) -> None:
    """At every length that a kill may leave: whole lines count, the rest is done anew."""
    folder = tmp_path / "out"
    with Journal(folder, SETTINGS, SESSION) as journal:
        journal.add([answered(0), answered(1)])
    path = folder / ".journal.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        with Journal(folder, SETTINGS, SESSION) as journal:
            done = [number for number in range(2) if number in journal]
            assert done == list(range((length >= first) + (length == len(whole))))
            journal.add(answered(number) for number in range(2) if number not in journal)
        assert path.read_bytes() == whole
    path.write_bytes(whole + b"\0" * 50 + b"\n")
    with Journal(folder, SETTINGS, SESSION) as journal:
        assert len(journal) == 2
    assert path.read_bytes() == whole


def test_a_kill_while_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the manifest says so, nothing is over; the next start ends with the same files."""
    folder = tmp_path / "out"
    with Journal(folder, SETTINGS, SESSION) as journal:
        journal.add([answered(0), rejected(1)])
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "_write_manifest", _killed)
            with pytest.raises(KeyboardInterrupt):
                journal.publish()
    (folder / ".staging-answers.jsonl").write_text("half")
    first = (folder / "answers.jsonl").read_bytes()
    with Journal(folder, SETTINGS, SESSION) as journal:
        assert not journal.complete
        assert len(journal) == 2
        journal.publish()
    assert (folder / "answers.jsonl").read_bytes() == first
    with Journal(folder, SETTINGS, SESSION) as journal:
        assert journal.complete
    assert not list(folder.glob(".*"))


def _killed(_self: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sampling": {"temperature": 0.5, "seed": 0}}, "sampling.temperature is 0.0 there and 0.5 here"),
        ({"batch": 3}, "batch is 2 there and 3 here"),
        ({"more": 1}, "more is None there and 1 here"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    with Journal(tmp_path, SETTINGS, SESSION) as journal:
        journal.add([answered(0)])
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(RequestError, match=field):
        Journal(tmp_path, SETTINGS | change, SESSION)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_other_versions_are_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for session in (SESSION, SESSION, {"versions": {"torch": "2"}}):
        with Journal(tmp_path, SETTINGS, session):
            pass
    assert json.loads((tmp_path / "manifest.json").read_text())["sessions"] == [SESSION, {"versions": {"torch": "2"}}]
    assert caplog.text.count("other versions or hardware") == 1


def test_folders_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="holds files, but no manifest"):
        Journal(tmp_path, SETTINGS, SESSION)
    for content in ("{", "[]", '{"files": {}}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(RequestError, match="no manifest of a generation"):
            Journal(tmp_path, SETTINGS, SESSION)
    (tmp_path / "manifest.json").write_text('{"format": 9, "state": "running"}')
    with pytest.raises(RequestError, match="format is 9, expected 1"):
        Journal(tmp_path, SETTINGS, SESSION)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        Journal(tmp_path, SETTINGS, SESSION),
        pytest.raises(EnvironmentFailure, match="another process"),
        Journal(tmp_path, SETTINGS, SESSION),
    ):
        pass


def test_a_finished_folder_that_was_changed(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS, SESSION) as journal:
        journal.add([answered(0)])
        journal.publish()
    (tmp_path / "answers.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="not what manifest.json describes"), Journal(tmp_path, SETTINGS, SESSION):
        pass


@pytest.mark.parametrize(
    ("entries", "reason"), [([rejected(0)], "none of 1 rows .*rows.jsonl:1: why"), ([], "no row")]
)
def test_nothing_answered(tmp_path: Path, entries: list[dict[str, Any]], reason: str) -> None:
    for _ in range(2):  # and again, when it is run again
        with Journal(tmp_path, SETTINGS, SESSION) as journal:
            journal.add(each for each in entries if each["row"] not in journal)
            with pytest.raises(DataError, match=reason):
                journal.publish()
        assert (tmp_path / "rejected.jsonl").exists() == bool(entries)
    assert json.loads((tmp_path / "manifest.json").read_text())["state"] == "running"


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message; what was done before is there when it goes on."""

    def full(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    def fill() -> None:
        with Journal(tmp_path, SETTINGS, SESSION) as journal:
            journal.add([answered(0)])
            monkeypatch.setattr("draftsmith.data.generate.journal.flush", full)
            journal.add([answered(1)])

    with pytest.raises(EnvironmentFailure, match="No space left .* run the same command again"):
        fill()
    monkeypatch.undo()
    with Journal(tmp_path, SETTINGS, SESSION) as journal:
        assert 0 in journal
