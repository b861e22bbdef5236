"""Rows answered by a server: side by side, in the order of the source, and where it fails."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.generate.answers import Asker
from draftsmith.data.generate.journal import Journal
from draftsmith.data.generate.server import answer_rows
from draftsmith.data.rows.records import Placed
from draftsmith.data.rows.shapes import Chat, Text
from draftsmith.errors import EnvironmentFailure, RequestError
from helpers.servers.scripted_server import REQUEST, Answer, Server, completion, in_turn, status


def chats(count: int) -> list[Placed]:
    return [
        Placed(
            "rows.jsonl",
            at + 1,
            Chat(
                [
                    {"role": "user", "content": f"row {at}"},
                    {"role": "assistant", "content": "OLD"},
                    {"role": "user", "content": "more"},
                    {"role": "assistant", "content": "OLD"},
                ]
            ),
        )
        for at in range(count)
    ]


def echo(_server: Server, body: dict[str, Any]) -> Answer:
    return completion("to " + " / ".join(each["content"] for each in body["messages"]))


def run(server: Server, tokenizer: Any, folder: Path, rows: list[Placed], **changes: Any) -> dict[str, Any]:
    asker = Asker(tokenizer, 8, 400, keep_cut=False, text_prompts=True)
    with Journal(folder, {"model": "some-model"}, {}) as journal:
        answer_rows(rows, asker, replace(REQUEST, url=server.url, **changes), journal)
        return journal.publish()


def answers(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_rows_side_by_side_in_the_order_of_the_source(serve: Any, tokenizer: Any, tmp_path: Path) -> None:
    meeting = threading.Barrier(4, timeout=60)  # broken, and the test with it, if they never meet

    def meet(server: Server, body: dict[str, Any]) -> Answer:
        if len(server.asked) <= 4:
            meeting.wait()
        return echo(server, body)

    server = serve(meet)
    manifest = run(server, tokenizer, tmp_path, chats(12))
    assert manifest["rows"]["answered"] == 12
    assert server.busiest == 4
    for at, row in enumerate(answers(tmp_path)):
        contents = [each["content"] for each in row["messages"]]
        assert contents[:3] == [f"row {at}", f"to row {at}", "more"]
        assert contents[3] == f"to row {at} / to row {at} / more"


def test_texts_and_chats_go_where_they_belong(serve: Any, tokenizer: Any, tmp_path: Path) -> None:
    def both(_: Server, body: dict[str, Any]) -> Answer:
        return completion("yes", chat="messages" in body)

    server = serve(both)
    rows = [*chats(1), Placed("text.txt", 1, Text("the fox asks"))]
    manifest = run(server, tokenizer, tmp_path, rows)
    assert set(manifest["files"]) == {"answers-messages.jsonl", "answers-tokens.jsonl"}
    assert {path for path, _, _ in server.asked} == {"/v1/completions", "/v1/chat/completions"}


def test_one_bad_row_does_not_stop_the_others(serve: Any, tokenizer: Any, tmp_path: Path) -> None:
    def picky(_: Server, body: dict[str, Any]) -> Answer:
        bad = body["messages"][0]["content"] in ("row 3", "row 19")
        return status(500, "no luck") if bad else completion("new")

    manifest = run(serve(picky), tokenizer, tmp_path, chats(20))
    assert manifest["rows"]["answered"] == 18
    rejected = [json.loads(line) for line in (tmp_path / "rejected.jsonl").open()]
    assert [each["line"] for each in rejected] == [4, 20]
    assert {each["kind"] for each in rejected} == {"server"}
    assert rejected[0]["reason"] == "turn 2: status 500: no luck (tried 4 times)"


@pytest.mark.parametrize("count", [3, 40])
def test_a_server_that_refuses_every_row(serve: Any, tokenizer: Any, tmp_path: Path, count: int) -> None:
    """No row is to blame: the run stops, and later they are asked for again."""
    broken = serve(in_turn(status(500, "no luck")))
    with pytest.raises(EnvironmentFailure, match="refused .* row.* status 500: no luck"):
        run(broken, tokenizer, tmp_path, chats(count), retries=0)
    assert len(broken.asked) <= 8 + REQUEST.concurrency
    assert (tmp_path / ".journal.jsonl").read_bytes() == b""
    manifest = run(serve(echo), tokenizer, tmp_path, chats(count))
    assert manifest["rows"] == {"answered": count, "rejected": 0, "rejected_by_kind": {}}


@pytest.mark.parametrize(("side_by_side", "refused"), [(3, 8), (4, 8), (5, 10)])
def test_a_server_is_doubted_where_each_place_was_refused_twice(
    side_by_side: int, refused: int, serve: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """And not before the eighth row."""
    broken = serve(in_turn(status(500, "no luck")))
    with pytest.raises(EnvironmentFailure, match=rf"refused {refused} row\(s\) one after the other"):
        run(broken, tokenizer, tmp_path, chats(12), retries=0, concurrency=side_by_side)


def test_it_goes_on_where_the_server_went_away(serve: Any, tokenizer: Any, tmp_path: Path) -> None:
    """What is done is not asked for again, and the file is that of a run without a stop."""

    def tires(server: Server, body: dict[str, Any]) -> Answer:
        return status(401, "away") if len(server.asked) > 11 else echo(server, body)

    with pytest.raises(RequestError, match="status 401"):
        run(serve(tires), tokenizer, tmp_path / "out", chats(12))
    done = len((tmp_path / "out" / ".journal.jsonl").read_text().splitlines())
    assert 2 <= done <= 5
    second = serve(echo)
    run(second, tokenizer, tmp_path / "out", chats(12))
    assert len(second.asked) == 2 * (12 - done)
    run(serve(echo), tokenizer, tmp_path / "whole", chats(12))
    assert answers(tmp_path / "out") == answers(tmp_path / "whole")


def test_what_the_server_was_told_is_kept(
    serve: Any, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder goes on with a server that lets the same be switched off: other answers would be drawn otherwise."""

    def strict(server: Server, body: dict[str, Any]) -> Answer:
        return status(422, "extra field min_p") if "min_p" in body else echo(server, body)

    def stops(server: Server, body: dict[str, Any]) -> Answer:
        # behind so many rows that some are answered, however many are asked for at once
        return status(401, "away") if body["messages"][0]["content"] == "row 11" else strict(server, body)

    with pytest.raises(RequestError, match="status 401"):
        run(serve(stops), tokenizer, tmp_path / "out", chats(12))
    told = json.loads((tmp_path / "out" / "manifest.json").read_text())["told_off"]
    assert told == ["top_k", "repetition_penalty", "presence_penalty", "frequency_penalty"]
    assert "refuses to be told that min_p is off" in caplog.text
    with pytest.raises(RequestError, match="told_off was top_k, repetition_penalty.* and is top_k, min_p"):
        run(serve(echo), tokenizer, tmp_path / "out", chats(12))
    assert run(serve(strict), tokenizer, tmp_path / "out", chats(12))["told_off"] == told


def test_thinking_that_never_ends_costs_one_request_a_row(serve: Any, tokenizer: Any, tmp_path: Path) -> None:
    """No retry, and no end of the run: rows are rejected as cut."""

    def thinks(server: Server, body: dict[str, Any]) -> Answer:
        first = body["messages"][0]["content"] == "row 0"
        return echo(server, body) if first else completion(None, reason="length", reasoning="hm")

    server = serve(thinks)
    manifest = run(server, tokenizer, tmp_path, chats(30))
    assert manifest["rows"] == {"answered": 1, "rejected": 29, "rejected_by_kind": {"cut": 29}}
    assert len(server.asked) == 2 + 29
