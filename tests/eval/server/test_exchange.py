"""A streamed answer, however it is named, split and framed, is the same answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import httpx2
import pytest
from draftsmith.data.generate.server_request import read_message
from draftsmith.data.generate.transport import Passing, Refused
from draftsmith.data.prompts import Prompt
from draftsmith.eval.server.exchange import Exchange, StreamedPieces, question
from hypothesis import example, given, settings
from hypothesis import strategies as st


def read(content: bytes, *cuts: int, kind: str | None = "text/event-stream") -> Exchange:
    """The answer of which these bytes come, cut at some of them."""
    edges = [0, *sorted({each % (len(content) + 1) for each in cuts}), len(content)]

    async def come() -> AsyncIterator[bytes]:
        for begin, end in zip(edges, edges[1:]):
            yield content[begin:end]

    async def whole() -> Exchange:
        ticks = count()
        pieces = StreamedPieces(lambda: float(next(ticks)))
        headers = {} if kind is None else {"content-type": kind}
        await pieces.read(
            httpx2.Response(200, headers=headers, content=come(), request=httpx2.Request("POST", "http://a"))
        )
        return pieces.exchange(0)

    return asyncio.run(whole())


def chunk(delta: Any, *, chat: bool = True, **more: Any) -> dict[str, Any]:
    own = {"delta": delta} if chat else {"text": delta}
    return {"choices": [{"index": 0, "finish_reason": None, **own}], **more}


def framed(chunks: list[Any], *, end: str = "\n", space: str = " ", before: str = "", done: bool = True) -> bytes:
    lines = [f"{before}data:{space}{json.dumps(each, ensure_ascii=False)}{end}{end}" for each in chunks]
    return "".join([*lines, *([f"data:{space}[DONE]{end}{end}"] if done else [])]).encode()


PIECES = st.lists(
    st.text(st.sampled_from('ab \n\u00e9\u4e16\U0001f600\u2028\r\\"{}:'), min_size=1, max_size=4),
    min_size=1,
    max_size=6,
)
NAMES = [
    ("reasoning",),
    ("reasoning_content",),
    ("reasoning_details",),
    ("reasoning", "reasoning_content"),
    ("reasoning_details", "reasoning"),
]


def thought(text: str, names: tuple[str, ...]) -> dict[str, Any]:
    return {
        name: [{"type": "reasoning.text", "text": text}] if name == "reasoning_details" else text for name in names
    }


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    thoughts=st.one_of(st.just([]), PIECES),
    texts=PIECES,
    calls=st.one_of(st.just([]), PIECES),
    names=st.sampled_from(NAMES),
    usage=st.sampled_from(["none", "null", "zeros", "last", "with the end", "always"]),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    space=st.sampled_from([" ", ""]),
    before=st.sampled_from(["", ": ping\n", "event: message\nid: 3\n"]),
    done=st.booleans(),
    nulls=st.booleans(),
    kind=st.sampled_from(
        [
            "text/event-stream",
            "text/event-stream; charset=utf-8",
            "text/event-stream; charset=iso-8859-1",
            "text/plain",
            None,
        ]
    ),
    cuts=st.lists(st.integers(0, 4000), max_size=30),
)
@example([], ["\U0001f600"], [], NAMES[0], "none", "\r\n", "", "", False, True, None, list(range(0, 4000)))
def test_any_stream_of_an_answer_is_the_answer(
    thoughts: list[str],
    texts: list[str],
    calls: list[str],
    names: tuple[str, ...],
    usage: str,
    end: str,
    space: str,
    before: str,
    done: bool,
    nulls: bool,
    kind: str | None,
    cuts: list[int],
) -> None:
    before = before.replace("\n", end)
    empty: dict[str, Any] = {"content": None, "tool_calls": None, "reasoning": None} if nulls else {}
    chunks = [chunk({"role": "assistant", "content": ""}, error=None) if nulls else chunk({"role": "assistant"})]
    chunks += [chunk(empty | thought(each, names)) for each in thoughts]
    chunks += [chunk(empty | {"content": each}) for each in texts]
    chunks += [chunk(empty | {"tool_calls": [{"index": 0, "function": {"arguments": each}}]}) for each in calls]
    pieces = [*thoughts, *texts, *calls]
    counts = {"prompt_tokens": 4, "completion_tokens": 3 * len(pieces)}
    last = {"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}]}
    if usage == "always":
        chunks = [each | {"usage": {"completion_tokens": at}} for at, each in enumerate(chunks)]
    chunks.append(last | ({"usage": counts} if usage in ("with the end", "always") else {}))
    if usage in ("null", "last", "zeros"):
        found = {"null": None, "last": counts, "zeros": dict.fromkeys(counts, 0)}[usage]
        chunks.append({"choices": [], "usage": found})
    done_ = read(framed(chunks, end=end, space=space, before=before, done=done), *cuts, kind=kind)
    assert done_.text == "".join(pieces)
    assert len(done_.gaps) == len(pieces) - 1
    known = usage in ("with the end", "always", "last")
    assert (done_.counted, done_.tokens) == (known, 3 * len(pieces) if known else len(pieces))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts=PIECES, cuts=st.lists(st.integers(0, 2000), max_size=20), usage=st.booleans())
def test_streams_of_texts(texts: list[str], cuts: list[int], usage: bool) -> None:
    chunks = [chunk(each, chat=False) for each in ["", *texts, None]]
    chunks += [{"choices": [], "usage": {"completion_tokens": 50}}] if usage else []
    found = read(framed(chunks), *cuts)
    assert (found.text, found.tokens) == ("".join(texts), 50 if usage else len(texts))


def test_a_server_that_does_not_stream_sends_one_piece() -> None:
    message = {"message": {"content": "new", "reasoning": "hm"}, "finish_reason": "stop"}
    for own, text in ((message, "hmnew"), ({"text": "new"}, "new")):
        content = json.dumps({"choices": [own], "usage": {"completion_tokens": 7}}).encode()
        found = read(content, 3, 9, kind="application/json; charset=utf-8")
        assert (found.text, found.tokens, found.counted, found.gaps) == (text, 7, True, [])


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"<html>", "text/html", "no stream of events"),
        (b"<html>", "application/json", "no completion in a piece"),
        (framed(["ping"]), "text/event-stream", "no completion in a piece"),
        (framed([{"error": {"message": "out of memory"}}]), "text/event-stream", "broke off: .*out of memory"),
        (b'event: error\ndata: {"message": "gone"}\n\n', "text/event-stream", "broke off: .*gone"),
    ],
)
def test_what_is_no_answer_may_be_one_the_next_time(content: bytes, kind: str, words: str) -> None:
    with pytest.raises(Passing, match=words):
        read(content, kind=kind)


def test_an_answer_of_nothing_is_refused() -> None:
    with pytest.raises(Refused, match="empty"):
        read(framed([chunk({"role": "assistant", "content": ""}), chunk({})]))


def test_counts_of_the_last_chunk_stay() -> None:
    own = {"num_spec_tokens": 3, "acceptance_histogram": [0, 0, 0, 2]}
    last = {"choices": [], "usage": {"completion_tokens": 9}, "metrics": {"speculative_decoding": own}}
    found = read(framed([chunk({"content": "a"}), last, {"choices": [], "metrics": None}])).acceptance
    assert found is not None
    assert (found.steps, found.emitted) == (2, 8)
    timed = [
        chunk({"content": "a"}, timings={"predicted_n": n, "draft_n": 3, "draft_n_accepted": a})
        for n, a in ((2, 0), (9, 4))
    ]
    found = read(framed(timed)).acceptance
    assert found is not None
    assert (found.steps, found.emitted) == (4, 8)


def test_a_question_says_the_values_of_the_template() -> None:
    chat, text = (Prompt("0", "", ("hi",), chat=each) for each in (True, False))
    assert "chat_template_kwargs" not in question(chat)[1]
    assert question(chat, {"enable_thinking": False})[1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert question(text, {"enable_thinking": False}) == ("completions", {"prompt": "hi"})


def test_a_message_of_odd_types_says_nothing() -> None:
    for odd in (3, True, {"a": 1}, None):
        told = read_message({"content": odd, "reasoning": odd, "reasoning_details": odd, "tool_calls": odd})
        assert (told.text, told.thoughts, told.calls, told.apart) == (None, "", "", False)
