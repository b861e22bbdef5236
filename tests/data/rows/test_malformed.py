"""Forty broken data files: each gives one clear message, exit code 2 or 3, and no traceback."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from draftsmith.launch.cli import main

GOOD = json.dumps(
    {
        "messages": [
            {"role": "user", "content": "What is a list?"},
            {"role": "assistant", "content": "A row of values."},
        ]
    }
)


def chat(*messages: object) -> str:
    return json.dumps({"messages": list(messages)})


def line(**columns: object) -> str:
    return json.dumps(columns)


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}

# name, suffix, content, the line that is named (None: the file as a whole), what is said of it
FILES: list[tuple[str, str, str | bytes, int | None, str]] = [
    ("cut_off_line", ".jsonl", GOOD + "\n" + GOOD[:40], 2, "not JSON"),
    ("html", ".jsonl", "<html>404 Not Found</html>", 1, "not JSON"),
    ("python_literal", ".jsonl", "{'text': 'single quotes'}", 1, "not JSON"),
    ("twice_the_key", ".jsonl", '{"text": "a", "text": "b"}', 1, "'text' is there twice"),
    ("bare_list", ".jsonl", '["a", "b"]', 1, "found a list; expected an object"),
    ("bare_number", ".jsonl", "17", 1, "found a number; expected an object"),
    ("bare_null", ".jsonl", "null", 1, "found null; expected an object"),
    ("deep_nesting", ".jsonl", '{"text": ' + "[" * 100_000, 1, "not JSON (nested too deeply)"),
    ("latin1", ".jsonl", '{"text": "caf\xe9"}'.encode("latin-1"), 1, "not UTF-8"),
    ("utf16", ".jsonl", GOOD.encode("utf-16"), None, "UTF-16"),
    ("gzip_by_name", ".jsonl", gzip.compress(GOOD.encode()), None, "gzip"),
    ("empty", ".jsonl", "", None, "holds no row"),
    ("blank_lines", ".jsonl", "\n\n  \n", None, "holds no row"),
    ("unknown_columns", ".jsonl", line(question="a", answer="b"), 1, "the columns are question, answer"),
    ("lone_surrogate", ".jsonl", '{"text": "a \\ud800 b"}', 1, "not valid Unicode"),
    ("nul_character", ".jsonl", '{"text": "a \\u0000 b"}', 1, "NUL"),
    ("text_is_number", ".jsonl", line(text=5), 1, "text is a number; expected text"),
    ("text_is_null", ".jsonl", line(text=None), 1, "text is null; expected text"),
    ("text_is_blank", ".jsonl", line(text="   \n"), 1, "text is empty"),
    ("messages_is_text", ".jsonl", line(messages="hello"), 1, "messages is text that is not JSON"),
    ("messages_empty", ".jsonl", line(messages=[]), 1, "messages is empty"),
    ("message_is_text", ".jsonl", chat("hello"), 1, "expected an object with role and content"),
    ("role_missing", ".jsonl", chat({"content": "hi"}), 1, "the role of messages[0] is missing"),
    ("role_unknown", ".jsonl", chat(USER, {"role": "narrator", "content": "x"}), 1, "'narrator'"),
    ("content_missing", ".jsonl", chat({"role": "user"}, ANSWER), 1, "has no content"),
    ("content_is_number", ".jsonl", chat({"role": "user", "content": 3}, ANSWER), 1, "expected text"),
    ("picture", ".jsonl", chat({"role": "user", "content": [{"type": "image"}]}, ANSWER), 1, "'image'"),
    ("nobody_answers", ".jsonl", chat(USER, USER), 1, "no assistant turn"),
    ("every_answer_empty", ".jsonl", chat(USER, {"role": "assistant", "content": ""}), 1, "is empty"),
    ("bad_tool_calls", ".jsonl", chat(USER, {"role": "assistant", "tool_calls": "f()"}), 1, "tool_calls"),
    ("prompt_is_number", ".jsonl", line(prompt=1, completion="b"), 1, "prompt is a number"),
    ("ids_are_text", ".jsonl", line(input_ids=["a", "b"]), 1, "expected a whole number"),
    ("ids_out_of_range", ".jsonl", line(input_ids=[1, 999_999]), 1, "the tokenizer's ids are 0 to"),
    ("ids_beyond_any_array", ".jsonl", line(input_ids=[1, 10**30]), 1, "input_ids[1] is 1000"),
    (
        "lone_surrogate_in_a_call",
        ".jsonl",
        chat(USER, ANSWER | {"tool_calls": [{"function": {"name": "\ud800"}}]}),
        1,
        "'tool_calls' of messages[1] is not valid Unicode",
    ),
    (
        "lone_surrogate_in_tools",
        ".jsonl",
        line(messages=[USER, ANSWER], tools=[{"name": "\udfff"}]),
        1,
        "tools is not valid Unicode",
    ),
    ("ids_too_few", ".jsonl", line(input_ids=[1]), 1, "one cannot be predicted"),
    ("mask_too_short", ".jsonl", line(input_ids=[1, 2], loss_mask=[1]), 1, "loss_mask has 1 entries"),
    ("labels_differ", ".jsonl", line(input_ids=[1, 2], labels=[-100, 7]), 1, "labels differ"),
    ("json_not_closed", ".json", "[" + GOOD + ",", 1, "not JSON"),
    ("json_garbage_behind", ".json", "[" + GOOD + "] tail", 1, "does not end well"),
    ("csv_ragged", ".csv", "prompt,completion\na,b,c\n", 2, "3 fields; the header has 2"),
    ("csv_header_twice", ".csv", "text,text\na,b\n", 1, "a repeated name"),
    ("csv_open_quote", ".csv", 'text\n"never closed\n', 2, "not CSV"),
    ("parquet_is_json", ".parquet", GOOD, None, "no complete Parquet file"),
    ("parquet_cut_off", ".parquet", b"PAR1" + b"\0" * 40, None, "no complete Parquet file"),
    ("text_not_utf8", ".txt", b"caf\xe9 \xff\n" * 5, 1, "not UTF-8"),
    ("unknown_suffix", ".docx", b"PK\x03\x04", None, "'.docx'"),
]


@pytest.mark.parametrize(("name", "suffix", "content", "line", "reason"), FILES, ids=[f[0] for f in FILES])
def test_one_clear_message(
    name: str,
    suffix: str,
    content: str | bytes,
    line: int | None,
    reason: str,
    chat_tokenizer_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It names the file, the line where there is one, and behind them what is wrong there."""
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    arguments = ["--target.path", str(chat_tokenizer_folder), "--data.source", str(path)]
    code = main(["inspect", "distill-tiny", *arguments])
    message = capfd.readouterr().err
    assert code == (2 if suffix == ".docx" else 3), message
    assert message.count("draftsmith: ") == 1, message
    where = f"{path} " if suffix == ".docx" else f"{path}: " if line is None else f"{path}:{line}: "
    assert [each for each in message.splitlines() if where in each and reason in each.partition(where)[2]], message
    assert "Traceback" not in message


def test_there_are_forty() -> None:
    assert len(FILES) >= 40
    assert (
        len({name for name, *_ in FILES}) == len({(suffix, content) for _, suffix, content, *_ in FILES}) == len(FILES)
    )


@pytest.mark.parametrize("source", ["no/such/folder", "*.none", "hub:", "."])
def test_sources_that_do_not_exist(
    source: str,
    chat_tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--target.path", str(chat_tokenizer_folder), f"--data.source={source}"]
    code = main(["inspect", "distill-tiny", *arguments])
    message = capfd.readouterr().err
    assert code in (2, 4), message
    assert "unexpected" not in message


def test_the_rejected_are_listed(
    chat_tokenizer_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One bad row in two hundred is left out, and listed; three are too many."""
    from draftsmith.data.config import DataConfig
    from draftsmith.data.rows.prepare import prepare
    from draftsmith.decoding.target.hub import load_tokenizer
    from draftsmith.errors import DataError

    tokenizer = load_tokenizer(str(chat_tokenizer_folder))
    rows = [chat(USER, {"role": "assistant", "content": f"answer {n}"}) for n in range(200)]
    rows[120] = "{broken"
    path, out = tmp_path / "rows.jsonl", tmp_path / "run"
    path.write_text("\n".join(rows))
    prepared = prepare(DataConfig(source=str(path)), tokenizer, out=out)
    assert prepared.report.rows == 199
    listed = [json.loads(each) for each in (out / "rejected.jsonl").read_text().splitlines()]
    assert [(Path(row["file"]).name, row["line"]) for row in listed] == [("rows.jsonl", 121)]
    assert "not JSON" in listed[0]["reason"]

    rows[3] = rows[7] = "17"
    path.write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"3 of 200 rows \(1.5%\) are unusable"):
        prepare(DataConfig(source=str(path)), tokenizer, out=out)
    assert len((out / "rejected.jsonl").read_text().splitlines()) == 3
