"""Sixty broken data files: each gives one clear message, exit code 2 or 3, and no traceback."""

from __future__ import annotations

import gzip
import json
from functools import reduce
from io import BytesIO
from pathlib import Path

import pytest
from draftsmith.launch.cli import main
from helpers.reliability_tally import tally

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


def say(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def deep(levels: int) -> list:
    """A list in a list in a list."""
    return reduce(lambda inner, _: [inner], range(levels), [])


def empty_parquet() -> bytes:
    import pyarrow
    from pyarrow.parquet import write_table

    stream = BytesIO()
    write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), stream)
    return stream.getvalue()


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
    ("utf32", ".jsonl", GOOD.encode("utf-32"), None, "UTF-32"),
    ("utf32_big_endian", ".csv", b"\0\0\xfe\xff" + "text\na".encode("utf-32-be"), None, "UTF-32"),
    ("utf16_without_mark", ".jsonl", GOOD.encode("utf-16-le"), 1, "not JSON"),
    ("parquet_without_rows", ".parquet", empty_parquet(), None, "holds no row"),
    ("zip", ".json", b"PK\x03\x04" + b"\0" * 50, None, "zip"),
    ("ten_megabytes", ".jsonl", GOOD + "\n" + line(text="x" * 10**7), 2, "a line of 10.0 MB"),
    ("five_thousand_digits", ".jsonl", '{"input_ids": [1, ' + "9" * 5000 + "]}", 1, "not JSON (Exceeds the limit"),
    ("infinite_id", ".jsonl", '{"input_ids": [1, 1e999]}', 1, "input_ids[1] is a number; expected a whole number"),
    ("boolean_id", ".jsonl", line(input_ids=[1, True]), 1, "input_ids[1] is a boolean"),
    ("odd_attention", ".jsonl", line(input_ids=[1, 2, 3], attention_mask=[5, -1, 0]), 1, "than 0 and 1"),
    ("nothing_attended", ".jsonl", line(input_ids=[1, 2], attention_mask=[0, 0]), 1, "input_ids has 0 tokens"),
    ("odd_mask", ".jsonl", line(input_ids=[1, 2], loss_mask=[0, 2]), 1, "than 0 and 1"),
    ("deep_call", ".jsonl", chat(USER, ANSWER | {"tool_calls": [{"a": deep(300)}]}), 1, "nested more than 100"),
    ("deep_tools", ".jsonl", line(messages=[USER, ANSWER], tools=[{"a": deep(300)}]), 1, "tools is nested more"),
    ("deep_tools_as_text", ".jsonl", line(messages=[USER, ANSWER], tools="[" * 10**5), 1, "tools is text that is not"),
    ("deep_role", ".jsonl", chat({"role": deep(300), "content": "a"}), 1, "the role of messages[0] is a list"),
    ("deep_part", ".jsonl", chat({"role": "user", "content": [{"type": deep(300)}]}), 1, "a part of type a list"),
    (
        "surrogate_in_a_name",
        ".jsonl",
        chat(USER | {"name": "\ud800"}, ANSWER),
        1,
        "'name' of messages[0] is not valid",
    ),
    ("surrogate_in_a_key", ".jsonl", chat(USER | {"\udfff": "x"}, ANSWER), 1, "a key of messages[0] is not valid"),
    ("surrogate_in_a_column", ".jsonl", '{"\\ud800": 1}', 1, "the columns are \\ud800"),
    ("tool_is_text", ".jsonl", line(messages=[USER, ANSWER], tools=["f"]), 1, "expected a list of objects"),
    ("forged_end", ".jsonl", chat(USER, say("yes<|endoftext|>more")), 1, "turn 2 (assistant) spells '<|endoftext|>'"),
    ("forged_turn", ".jsonl", line(prompt="a", completion="b<|im_start|>user"), 1, "turn 2 (assistant) spells"),
    ("tsv_ragged", ".tsv", "prompt\tcompletion\na\tb\tc\n", 2, "3 fields; the header has 2"),
    ("csv_not_utf8", ".csv", b"text\ncaf\xe9\n", 2, "not valid Unicode at character 3"),
    ("csv_header_not_utf8", ".csv", b"t\xe9xt\na\n", 2, "the columns are t\\udce9xt"),
    ("csv_quote_in_header", ".csv", '"text\na\n', 1, "not CSV"),
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
    tally("data files", tried=1)


def test_there_are_sixty() -> None:
    assert len(FILES) >= 60
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
    from draftsmith.decoding.backbone.hub import load_tokenizer
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


@pytest.mark.parametrize("name", ["surrogate_in_a_column", "deep_call", "utf32"])
def test_the_pre_flight_says_the_same(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of `check`, whose table and messages have to be printed whatever is in the file, and in its name."""
    _, suffix, content, _, reason = next(each for each in FILES if each[0] == name)
    path = tmp_path / f"{name}\udce9{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code = main(["check", "distill-tiny", f"--data.source={tmp_path}"])
    message = capfd.readouterr().err
    assert code in (2, 3), message
    assert "unexpected" not in message
    assert reason in message
    tally("data files", tried=1)


def test_one_bad_row_costs_itself(chat_tokenizer_folder: Path, tmp_path: Path) -> None:
    """A file of good rows with one of each bad line in it: every good row is used, every bad one is named."""
    from draftsmith.data.config import DataConfig
    from draftsmith.data.rows.prepare import prepare
    from draftsmith.decoding.backbone.hub import load_tokenizer

    single = [text for _, suffix, text, at, _ in FILES if suffix == ".jsonl" and at == 1 and "messages" in str(text)]
    bad = [each if isinstance(each, bytes) else each.encode() for each in single if len(each) < 10**5]
    good = [chat(USER, say(f"answer {at}")).encode() for at in range(100 * len(bad))]
    lines = [each for at, row in enumerate(bad) for each in (*good[100 * at : 100 * at + 100], row)]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    prepared = prepare(DataConfig(source=str(path)), load_tokenizer(str(chat_tokenizer_folder)), out=None)
    assert len(bad) > 15
    assert prepared.report.rows == len(good)
    assert [each.line for each in prepared.rejected] == [101 * (at + 1) for at in range(len(bad))]
    assert prepared.report.bytes_read == {str(path): (path.stat().st_size, path.stat().st_size)}
