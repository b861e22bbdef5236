"""The client of an OpenAI-compatible server, against a small one that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

import pytest
from draftsmith.data.generate.answers import Ask, NoAnswer
from draftsmith.data.generate.server import Client
from draftsmith.data.generate.server_defaults import filled_in, left_on
from draftsmith.data.generate.server_request import LEVELS, OFF, told_tokens
from draftsmith.data.generate.transport import Refused, _retry_after
from draftsmith.errors import EnvironmentFailure, RequestError
from helpers.servers.scripted_server import REQUEST, Answer, Server, completion, in_turn, status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT = Ask([1], "<|im_start|>user", [{"role": "user", "content": "one"}])
TEXT = Ask([1], "import os\n")


def ask(server: Server | str, tokenizer: PreTrainedTokenizerBase, question: Ask = CHAT, **changes: Any) -> Any:
    url = server if isinstance(server, str) else server.url

    async def once() -> Any:
        async with Client(replace(REQUEST, url=url, **changes), tokenizer) as client:
            return await client.reply(question, "0:0")

    return asyncio.run(once())


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
        **OFF,
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
        "max_tokens": 40,
        **OFF,
        "top_k": 9,
    }
    ask(server, tokenizer, TEXT, temperature=0.7, seed=4)
    assert server.asked[1][1]["seed"] != seed


def test_tokens_are_counted_where_the_server_does_not(serve: Any, tokenizer: Any) -> None:
    content = {"choices": [{"message": {"content": "the fox"}, "finish_reason": "stop"}]}
    server = serve(in_turn((200, {}, json.dumps(content).encode())))
    assert ask(server, tokenizer).tokens == len(tokenizer("the fox")["input_ids"])
    content["choices"][0]["message"]["reasoning"] = "a dog"  # type: ignore[index]
    server = serve(in_turn((200, {}, json.dumps(content | {"usage": None}).encode())))
    assert ask(server, tokenizer).tokens == len(tokenizer("a dogthe fox")["input_ids"])


def test_a_server_that_does_not_count_is_named_once(
    serve: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    content = {"choices": [{"message": {"content": "the fox"}, "finish_reason": "stop"}]}
    server = serve(in_turn((200, {}, json.dumps(content).encode())))
    caplog.set_level("INFO")

    async def twice() -> None:
        async with Client(replace(REQUEST, url=server.url), tokenizer) as client:
            await client.reply(CHAT, "0:0")
            await client.reply(CHAT, "1:0")

    asyncio.run(twice())
    assert caplog.text.count("does not say how many tokens an answer has") == 1


@pytest.mark.parametrize(
    ("unknown", "told"),
    [
        ((), LEVELS[0]),
        (("repetition_penalty",), LEVELS[1]),
        (("min_p",), LEVELS[2]),
        (("min_p", "repetition_penalty"), LEVELS[3]),
        (("top_k",), LEVELS[4]),
        (tuple(OFF), LEVELS[5]),
    ],
)
@pytest.mark.parametrize("code", [400, 422])
def test_a_servers_own_sampling_is_switched_off_as_far_as_it_goes(
    serve: Any, tokenizer: Any, unknown: tuple[str, ...], told: tuple[str, ...], code: int
) -> None:
    """Found by the first answer, and kept; a later request that is refused is asked for once."""

    def strict(_: Server, body: dict[str, Any]) -> Answer:
        if body["messages"][0]["content"] == "bad":
            return status(code, "too long")
        return status(code, "extra field") if set(unknown) & set(body) else completion("new")

    server, settled = serve(strict), []

    async def twice() -> None:
        async with Client(replace(REQUEST, url=server.url), tokenizer, settled.append) as client:
            await client.reply(CHAT, "0:0")
            with pytest.raises(Refused, match="too long"):
                await client.reply(Ask([1], "", [{"role": "user", "content": "bad"}]), "1:0")
            await client.reply(CHAT, "2:0")

    asyncio.run(twice())
    assert settled == [told]
    assert len(server.asked) == LEVELS.index(told) + 1 + 2
    assert all(server.asked[-1][1].get(name) == (OFF[name] if name in told else None) for name in OFF)
    sentence = left_on(told)
    assert (sentence is None) == (told == LEVELS[0])
    assert all((name in (sentence or "")) == (name not in told) for name in OFF)


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_what_passes_is_tried_again(serve: Any, tokenizer: Any, code: int) -> None:
    server = serve(in_turn(status(code), status(code), completion("new")))
    assert ask(server, tokenizer).text == "new"
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(503, "over\n \x1b loaded"), r"status 503: over loaded \(tried 4 times\)"),
        ((200, {}, b"<html>"), r"no completion in the answer: <html> \(tried 4 times\)"),
        ((200, {}, b'{"choices": []}'), "no completion in the answer"),
        ((200, {}, b"[]"), "no completion in the answer"),
        ((200, {}, b'{"choices": [{"message": null, "finish_reason": "stop"}]}'), "no completion"),
        (None, "the connection broke"),
        ((200, {"Content-Length": "500"}, b'{"choices'), "the connection broke"),
    ],
)
def test_refused_after_retries(serve: Any, tokenizer: Any, answer: Answer, reason: str) -> None:
    server = serve(in_turn(answer))
    with pytest.raises(Refused, match=reason) as caught:
        ask(server, tokenizer)
    assert caught.value.kind == "server"
    assert len(server.asked) == 4


def test_waits_double_and_are_spread(serve: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("draftsmith.data.generate.transport.asyncio.sleep", sleep)
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
    assert _retry_after("599") == 599
    assert [_retry_after(each) for each in ("601", "86400", "inf")] == [600, 600, 600]
    assert _retry_after("nan") is None
    assert 50 < (_retry_after(formatdate(time.time() + 100, usegmt=True)) or 0) <= 100
    assert _retry_after(formatdate(time.time() - 100, usegmt=True)) == 0


@pytest.mark.parametrize("code", [400, 413, 422])
def test_a_bad_request_is_not_repeated(serve: Any, tokenizer: Any, code: int) -> None:
    """It is asked once with each set of names that a server may know, and behind an answered one once."""
    server = serve(in_turn(status(code, "too long")))
    with pytest.raises(Refused, match=f"^status {code}: too long$"):
        ask(server, tokenizer)
    told = [set(OFF) & set(body) for _, body, _ in server.asked]
    assert told == ([set(OFF)] if code == 413 else [set(each) for each in LEVELS])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(401, "no key"), "status 401: no key; check .* OPENAI_API_KEY, which is not set"),
        (status(404, "no model"), "status 404: no model; check --server, --model 'some-model'"),
        (status(307, Location="https://other/v1"), "leads to https://other/v1: name that"),
    ],
)
def test_what_no_row_is_to_blame_for(serve: Any, tokenizer: Any, answer: Answer, reason: str) -> None:
    server = serve(in_turn(answer))
    with pytest.raises(RequestError, match=reason):
        ask(server, tokenizer)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (completion("", tool_calls=[{}]), "calls a tool"),
        (completion(None, tool_calls=[{"function": {"name": "sum", "arguments": "{}"}}]), "calls a tool"),
        (completion(None, function_call={"name": "sum", "arguments": "{}"}), "calls a tool"),
        (completion("n", reason="content_filter"), "ended the answer by 'content_filter'"),
        (completion("n", reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}]), "thoughts back"),
        (completion("n", reasoning="in short", reasoning_details=[{"type": "reasoning.summary"}]), "thoughts back"),
    ],
)
def test_answers_that_are_none(serve: Any, tokenizer: Any, answer: Answer, reason: str) -> None:
    server = serve(in_turn(answer))
    with pytest.raises(NoAnswer, match=reason) as caught:
        ask(server, tokenizer)
    assert not isinstance(caught.value, Refused)
    assert len(server.asked) == 1


@pytest.mark.parametrize("text", [None, "", " \n"])
@pytest.mark.parametrize(
    ("reason", "thoughts", "kind", "words"),
    [
        ("length", {}, "cut", "cut off after 5 tokens$"),
        ("stop", {"reasoning": "hm"}, "empty", "empty, its thoughts apart"),
        ("stop", {}, "empty", "empty$"),
    ],
)
def test_an_answer_without_text_is_asked_for_once(
    serve: Any, tokenizer: Any, text: str | None, reason: str, thoughts: dict[str, str], kind: str, words: str
) -> None:
    server = serve(in_turn(completion(text, reason=reason, **thoughts)))
    with pytest.raises(NoAnswer, match=words) as caught:
        ask(server, tokenizer)
    assert caught.value.kind == kind
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("reason", "limit", "ended"),
    [
        *((name, 40, True) for name in ("stop", "STOP", "eos", "eos_token", "end_turn", "stop_sequence")),
        *((name, 40, False) for name in ("length", "max_tokens", "MAX_TOKENS", "max_length")),
        (None, 6, True),  # nothing is said, and five of six tokens are there
        (None, 5, False),
        ("", 5, False),
    ],
)
def test_ends_by_the_names_that_servers_have(
    serve: Any, tokenizer: Any, reason: str | None, limit: int, ended: bool
) -> None:
    reply = ask(serve(in_turn(completion("new", reason=reason))), tokenizer, max_new_tokens=limit)
    assert reply.ended == ended


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_thoughts_that_were_cut_off_are_kept(serve: Any, tokenizer: Any, text: str | None) -> None:
    reply = ask(serve(in_turn(completion(text, reason="length", reasoning="hm"))), tokenizer)
    assert (reply.text, reply.reasoning, reply.ended) == ("", "hm", False)


def test_a_count_of_zero_is_none(serve: Any, tokenizer: Any) -> None:
    code, headers, body = completion("new and old")
    empty = json.dumps(json.loads(body) | {"usage": {"completion_tokens": 0}}).encode()
    reply = ask(serve(in_turn((code, headers, empty))), tokenizer)
    assert reply.tokens == len(tokenizer("new and old")["input_ids"]) > 0
    told = [told_tokens({"completion_tokens": each}, "completion_tokens") for each in (3, 0, -1, True, "3", None)]
    assert told == [3, None, None, None, None, None]
    assert told_tokens(None, "completion_tokens") is None


DETAILS = [{"type": "reasoning.text", "text": "h", "index": 0}, {"type": "reasoning.text", "text": "m", "index": 1}]


@pytest.mark.parametrize(
    "named",
    [
        {"reasoning": "hm"},
        {"reasoning": "hm", "reasoning_content": None},
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"reasoning_details": DETAILS},
        {"reasoning_details": DETAILS, "reasoning": "hm", "reasoning_content": "hm"},
        {"reasoning_details": [], "reasoning": "hm", "tool_calls": [], "function_call": None, "refusal": None},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                {"type": "text", "text": "new"},
            ]
        },
    ],
)
def test_thoughts_by_any_name_are_one_text(serve: Any, tokenizer: Any, named: dict[str, Any]) -> None:
    content = named.pop("content", "new") if "content" in named else "new"
    reply = ask(serve(in_turn(completion(content, **named))), tokenizer)
    assert (reply.text, reply.reasoning) == ("new", "hm")


def test_values_of_the_template_go_with_chats(serve: Any, tokenizer: Any) -> None:
    server = serve(lambda _, body: completion("new", chat="messages" in body))
    ask(server, tokenizer, template_values={"enable_thinking": False})
    ask(server, tokenizer, TEXT, template_values={"enable_thinking": False})
    assert [body.get("chat_template_kwargs") for _, body, _ in server.asked] == [{"enable_thinking": False}, None]


def test_an_answer_that_takes_too_long(serve: Any, tokenizer: Any) -> None:
    over = threading.Event()

    def hang(server: Server, _: dict[str, Any]) -> Answer:
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


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"top_k": 20, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.05},
            "top_k = 20, repetition_penalty = 1.05,",
        ),
        ({"min_p": 0.05}, "min_p = 0.05,"),
        ({"top_k": 0, "min_p": None, "repetition_penalty": 1.0, "presence_penalty": 0.0}, None),
        ({"top_k": -1, "eos_token_id": 3}, None),
        ({}, None),
    ],
)
def test_a_targets_own_sampling_is_named(settings: dict[str, Any], named: str | None) -> None:
    sentence = filled_in(settings)
    assert (sentence is None) == (named is None)
    assert named is None or f"generation_config.json has {named} which servers fill in" in (sentence or "")
