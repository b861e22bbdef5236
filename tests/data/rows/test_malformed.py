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

# name, suffix, content, what the message has to say
FILES: list[tuple[str, str, str | bytes, str]] = [
    ("cut_off_line", ".jsonl", GOOD + "\n" + GOOD[:40], "not JSON"),
    ("html", ".jsonl", "<html>404 Not Found</html>", "not JSON"),
    ("python_literal", ".jsonl", "{'text': 'single quotes'}", "not JSON"),
    ("twice_the_key", ".jsonl", '{"text": "a", "text": "b"}', "'text' is there twice"),
    ("bare_list", ".jsonl", '["a", "b"]', "found a list; expected an object"),
    ("bare_number", ".jsonl", "17", "found a number; expected an object"),
    ("bare_null", ".jsonl", "null", "found null; expected an object"),
    ("deep_nesting", ".jsonl", '{"text": ' + "[" * 100_000, "not JSON (nested too deeply)"),
    ("latin1", ".jsonl", '{"text": "caf\xe9"}'.encode("latin-1"), "not UTF-8"),
    ("utf16", ".jsonl", GOOD.encode("utf-16"), "UTF-16"),
    ("gzip_by_name", ".jsonl", gzip.compress(GOOD.encode()), "gzip"),
    ("empty", ".jsonl", "", "holds no row"),
    ("blank_lines", ".jsonl", "\n\n  \n", "holds no row"),
    ("unknown_columns", ".jsonl", line(question="a", answer="b"), "the columns are question, answer"),
    ("lone_surrogate", ".jsonl", '{"text": "a \\ud800 b"}', "not valid Unicode"),
    ("nul_character", ".jsonl", '{"text": "a \\u0000 b"}', "NUL"),
    ("text_is_number", ".jsonl", line(text=5), "text is a number; expected text"),
    ("text_is_null", ".jsonl", line(text=None), "text is null; expected text"),
    ("text_is_blank", ".jsonl", line(text="   \n"), "text is empty"),
    ("messages_is_text", ".jsonl", line(messages="hello"), "messages is text that is not JSON"),
    ("messages_empty", ".jsonl", line(messages=[]), "messages is empty"),
    ("message_is_text", ".jsonl", chat("hello"), "expected an object with role and content"),
    ("role_missing", ".jsonl", chat({"content": "hi"}), "the role of messages[0] is missing"),
    ("role_unknown", ".jsonl", chat(USER, {"role": "narrator", "content": "x"}), "'narrator'"),
    ("content_missing", ".jsonl", chat({"role": "user"}, ANSWER), "has no content"),
    ("content_is_number", ".jsonl", chat({"role": "user", "content": 3}, ANSWER), "expected text"),
    ("picture", ".jsonl", chat({"role": "user", "content": [{"type": "image"}]}, ANSWER), "'image'"),
    ("nobody_answers", ".jsonl", chat(USER, USER), "no assistant turn"),
    ("every_answer_empty", ".jsonl", chat(USER, {"role": "assistant", "content": ""}), "is empty"),
    ("bad_tool_calls", ".jsonl", chat(USER, {"role": "assistant", "tool_calls": "f()"}), "tool_calls"),
    ("prompt_is_number", ".jsonl", line(prompt=1, completion="b"), "prompt is a number"),
    ("ids_are_text", ".jsonl", line(input_ids=["a", "b"]), "expected a whole number"),
    ("ids_out_of_range", ".jsonl", line(input_ids=[1, 999_999]), "the tokenizer's ids are 0 to"),
    ("ids_too_few", ".jsonl", line(input_ids=[1]), "one cannot be predicted"),
    ("mask_too_short", ".jsonl", line(input_ids=[1, 2], loss_mask=[1]), "loss_mask has 1 entries"),
    ("labels_differ", ".jsonl", line(input_ids=[1, 2], labels=[-100, 7]), "labels differ"),
    ("json_not_closed", ".json", "[" + GOOD + ",", "not JSON"),
    ("json_garbage_behind", ".json", "[" + GOOD + "] tail", "does not end well"),
    ("csv_ragged", ".csv", "prompt,completion\na,b,c\n", "3 fields; the header has 2"),
    ("csv_header_twice", ".csv", "text,text\na,b\n", "a repeated name"),
    ("csv_open_quote", ".csv", 'text\n"never closed\n', "not CSV"),
    ("parquet_is_json", ".parquet", GOOD, "no complete Parquet file"),
    ("parquet_cut_off", ".parquet", b"PAR1" + b"\0" * 40, "no complete Parquet file"),
    ("text_not_utf8", ".txt", b"caf\xe9 \xff\n" * 5, "not UTF-8"),
    ("unknown_suffix", ".docx", b"PK\x03\x04", "'.docx'"),
]


@pytest.mark.parametrize(("name", "suffix", "content", "reason"), FILES, ids=[f[0] for f in FILES])
def test_one_clear_message(
    name: str,
    suffix: str,
    content: str | bytes,
    reason: str,
    chat_tokenizer_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    words = ["--target.path", str(chat_tokenizer_folder), "--data.source", str(path)]
    code = main(["inspect", "distill-tiny", *words])
    said = capfd.readouterr().err
    assert code in (2, 3), said
    assert said.count("draftsmith: ") == 1, said
    assert reason in said
    assert path.name in said or suffix in said
    assert "Traceback" not in said


def test_there_are_forty() -> None:
    assert len(FILES) >= 40


@pytest.mark.parametrize("source", ["no/such/folder", "*.none", "hub:", "."])
def test_sources_that_do_not_exist(
    source: str,
    chat_tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--target.path", str(chat_tokenizer_folder), f"--data.source={source}"]
    code = main(["inspect", "distill-tiny", *words])
    said = capfd.readouterr().err
    assert code in (2, 4), said
    assert "unexpected" not in said


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
