"""The client of an OpenAI-compatible server, against a small one that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from draftsmith.data.generate.answers import Ask, Asker, NoAnswer
from draftsmith.data.generate.journal import Journal
from draftsmith.data.generate.server import Client, Refused, _retry_after, answer_rows
from draftsmith.data.generate.server_request import ServerRequest
from draftsmith.data.rows.records import Placed
from draftsmith.data.rows.shapes import Chat, Text
from draftsmith.errors import EnvironmentFailure, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Said = tuple[int, dict[str, str], bytes] | None
Script = Callable[["Server", dict[str, Any]], Said]


class Server(ThreadingHTTPServer):
    """Answers as `script` says; None breaks the connection."""

    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.lock = threading.Lock()
        self.busy = self.busiest = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, body, _lower(self.headers)))
            self.server.busy += 1
            self.server.busiest = max(self.server.busiest, self.server.busy)
        said = self.server.script(self.server, body)
        with self.server.lock:
            self.server.busy -= 1
        if said is None:
            self.close_connection = True
            return
        status, headers, content = said
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def completion(text: str, *, chat: bool = True, reason: str = "stop", **more: Any) -> Said:
    said = {"message": {"role": "assistant", "content": text, **more}} if chat else {"text": text}
    content = {"choices": [{**said, "finish_reason": reason}], "usage": {"completion_tokens": 5}}
    return 200, {}, json.dumps(content).encode()


def status(code: int, text: str = "busy", **headers: str) -> Said:
    return code, {name.replace("_", "-"): value for name, value in headers.items()}, text.encode()


@pytest.fixture
def serve() -> Iterator[Callable[[Script], Server]]:
    running: list[Server] = []

    def start(script: Script) -> Server:
        server = Server(script)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def tokenizer(chat_tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    from draftsmith.decoding.target.hub import load_tokenizer

    return load_tokenizer(str(chat_tokenizer_folder))


REQUEST = ServerRequest("", "some-model", 0.0, 0, 1.0, 40, 3, concurrency=4, retries=3, timeout=20.0, first_wait=0.01)
CHAT = Ask([1], "<|im_start|>user", [{"role": "user", "content": "one"}])
TEXT = Ask([1], "import os\n")


def ask(server: Server | str, tokenizer: PreTrainedTokenizerBase, question: Ask = CHAT, **changes: Any) -> Any:
    url = server if isinstance(server, str) else server.url

    async def once() -> Any:
        async with Client(replace(REQUEST, url=url, **changes), tokenizer) as client:
            return await client.reply(question, "0:0")

    return asyncio.run(once())


def in_turn(*said: Said) -> Script:
    """One after the other, the last one for ever."""
    return lambda server, _: said[min(len(server.asked), len(said)) - 1]


def test_a_chat(serve: Any, tokenizer: Any) -> None:
    server = serve(in_turn(completion("new", reasoning_content="hm")))
    reply = ask(server, tokenizer)
    assert (reply.text, reply.tokens, reply.ended, reply.reasoning) == ("new", 5, True, "hm")
    assert reply.ids is None
    ((path, body, headers),) = server.asked
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "some-model",
        "messages": CHAT.messages,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 40,
    }
    assert "authorization" not in headers


def test_a_text(serve: Any, tokenizer: Any) -> None:
    server = serve(in_turn(completion("import", chat=False, reason="length")))
    reply = ask(server, tokenizer, TEXT, temperature=0.7, top_k=9)
    assert (reply.text, reply.ended) == ("import", False)
    ((path, body, _),) = server.asked
    assert path == "/v1/completions"
    seed = body.pop("seed")
    assert 0 <= seed < 2**31
    assert body == {
        "model": "some-model",
        "prompt": "import os\n",
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 9,
        "max_tokens": 40,
    }
    ask(server, tokenizer, TEXT, temperature=0.7, seed=4)
    assert server.asked[1][1]["seed"] != seed


def test_tokens_are_counted_where_the_server_does_not(serve: Any, tokenizer: Any) -> None:
    content = {"choices": [{"message": {"content": "the fox"}, "finish_reason": "stop"}]}
    server = serve(in_turn((200, {}, json.dumps(content).encode())))
    assert ask(server, tokenizer).tokens == len(tokenizer("the fox")["input_ids"])


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_what_passes_is_tried_again(serve: Any, tokenizer: Any, code: int) -> None:
    server = serve(in_turn(status(code), status(code), completion("new")))
    assert ask(server, tokenizer).text == "new"
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (status(503, "over\n loaded"), r"status 503: over loaded \(tried 4 times\)"),
        ((200, {}, b"<html>"), r"no completion in the answer: <html> \(tried 4 times\)"),
        ((200, {}, b'{"choices": []}'), "no completion in the answer"),
        ((200, {}, b"[]"), "no completion in the answer"),
        ((200, {}, b'{"choices": [{"message": null, "finish_reason": "stop"}]}'), "no completion"),
        (completion(None), "no text in the answer"),  # type: ignore[arg-type]
        (None, "the connection broke"),
        ((200, {"Content-Length": "500"}, b'{"choices'), "the connection broke"),
    ],
)
def test_refused_after_retries(serve: Any, tokenizer: Any, said: Said, reason: str) -> None:
    server = serve(in_turn(said))
    with pytest.raises(Refused, match=reason) as caught:
        ask(server, tokenizer)
    assert caught.value.kind == "server"
    assert len(server.asked) == 4


def test_waits_double_and_are_spread(serve: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("draftsmith.data.generate.server.asyncio.sleep", sleep)
    server = serve(in_turn(*[status(500)] * 9, status(429, Retry_After="7.5"), completion("new")))
    assert ask(server, tokenizer, retries=10, first_wait=0.5).text == "new"
    assert slept[9] == 7.5
    longest = [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert all(most / 2 <= each <= most for each, most in zip(slept, longest))
    assert len(set(slept)) == 10


def test_retry_after() -> None:
    assert _retry_after(None) is None
    assert _retry_after("soon") is None
    assert _retry_after("3") == 3
    assert _retry_after("-3") == 0
    assert 50 < (_retry_after(formatdate(time.time() + 100, usegmt=True)) or 0) <= 100
    assert _retry_after(formatdate(time.time() - 100, usegmt=True)) == 0


@pytest.mark.parametrize("code", [400, 413, 422])
def test_a_bad_request_is_not_repeated(serve: Any, tokenizer: Any, code: int) -> None:
    server = serve(in_turn(status(code, "too long")))
    with pytest.raises(Refused, match=f"^status {code}: too long$"):
        ask(server, tokenizer)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (status(401, "no key"), "status 401: no key; check .* OPENAI_API_KEY, which is not set"),
        (status(404, "no model"), "status 404: no model; check --server, --model 'some-model'"),
        (status(307, Location="https://other/v1"), "leads to https://other/v1: name that"),
    ],
)
def test_what_no_row_is_to_blame_for(serve: Any, tokenizer: Any, said: Said, reason: str) -> None:
    server = serve(in_turn(said))
    with pytest.raises(RequestError, match=reason):
        ask(server, tokenizer)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (completion("", tool_calls=[{}]), "calls a tool"),
        (completion("n", reason="content_filter"), "ended the answer by 'content_filter'"),
    ],
)
def test_answers_that_are_none(serve: Any, tokenizer: Any, said: Said, reason: str) -> None:
    with pytest.raises(NoAnswer, match=reason) as caught:
        ask(serve(in_turn(said)), tokenizer)
    assert not isinstance(caught.value, Refused)


def test_an_answer_that_takes_too_long(serve: Any, tokenizer: Any) -> None:
    over = threading.Event()

    def hang(server: Server, _: dict[str, Any]) -> Said:
        if len(server.asked) == 1:
            over.wait(60)
        return completion("new")

    server = serve(hang)
    try:
        assert ask(server, tokenizer, timeout=1.0).text == "new"
    finally:
        over.set()
    assert len(server.asked) >= 2


def test_nobody_there(serve: Any, tokenizer: Any) -> None:
    server = Server(in_turn())
    server.server_close()
    with pytest.raises(EnvironmentFailure, match="tried 4 times: no connection .* start the server"):
        ask(server.url, tokenizer)


def test_the_key_is_sent_and_never_shown(serve: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server = serve(in_turn(status(401, "the key sk-secret is wrong")))
    with pytest.raises(RequestError, match=r"the key \.\.\. is wrong; .* which is set") as caught:
        ask(server, tokenizer)
    assert "sk-secret" not in str(caught.value)
    assert server.asked[0][2]["authorization"] == "Bearer sk-secret"


@pytest.mark.parametrize(
    ("url", "base", "public"),
    [
        ("http://host:8000", "http://host:8000/v1", None),
        ("http://host:8000/", "http://host:8000/v1", None),
        ("https://host/v1/", "https://host/v1", None),
        ("https://host/v1beta/openai", "https://host/v1beta/openai", None),
        ("http://me:pass@host", "http://me:pass@host/v1", "http://host/v1"),
    ],
)
def test_urls(url: str, base: str, public: str | None) -> None:
    request = replace(REQUEST, url=url)
    assert (request.base_url, request.public_url) == (base, public or base)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "", "http://", "http://host:99999", "http://["])
def test_no_urls(url: str) -> None:
    with pytest.raises(RequestError, match="is no URL"):
        _ = replace(REQUEST, url=url).base_url


# whole sources


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


def echo(_server: Server, body: dict[str, Any]) -> Said:
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

    def meet(server: Server, body: dict[str, Any]) -> Said:
        if len(server.asked) <= 4:
            meeting.wait()
        return echo(server, body)

    server = serve(meet)
    manifest = run(server, tokenizer, tmp_path, chats(12))
    assert manifest["rows"]["answered"] == 12
    assert server.busiest == 4
    for at, row in enumerate(answers(tmp_path)):
        said = [each["content"] for each in row["messages"]]
        assert said[:3] == [f"row {at}", f"to row {at}", "more"]
        assert said[3] == f"to row {at} / to row {at} / more"


def test_texts_and_chats_go_where_they_belong(serve: Any, tokenizer: Any, tmp_path: Path) -> None:
    def both(_: Server, body: dict[str, Any]) -> Said:
        return completion("yes", chat="messages" in body)

    server = serve(both)
    rows = [*chats(1), Placed("text.txt", 1, Text("the fox asks"))]
    manifest = run(server, tokenizer, tmp_path, rows)
    assert set(manifest["files"]) == {"answers-messages.jsonl", "answers-tokens.jsonl"}
    assert {path for path, _, _ in server.asked} == {"/v1/completions", "/v1/chat/completions"}


def test_one_bad_row_does_not_stop_the_others(serve: Any, tokenizer: Any, tmp_path: Path) -> None:
    def picky(_: Server, body: dict[str, Any]) -> Said:
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


def test_it_goes_on_where_the_server_went_away(serve: Any, tokenizer: Any, tmp_path: Path) -> None:
    """What is done is not asked for again, and the file is that of a run without a stop."""

    def tires(server: Server, body: dict[str, Any]) -> Said:
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
