"""One answer as it comes, on the test's own clock: when its pieces came, how many tokens they are, what was refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.data.generate.server_defaults import Defaults
from draftsmith.data.generate.transport import Passing, Refused
from draftsmith.data.prompts import Prompt
from draftsmith.eval.server import exchange as exchanging
from draftsmith.eval.server.exchange import Exchange, exchange, question
from helpers.servers.scripted_server import REQUEST

Piece = tuple[float, dict[str, Any] | str]
TEXT, CHAT = (Prompt("0", "all", ("say",), chat=chat) for chat in (False, True))


class Wire:
    """A transport that hands out events at planned times; a try that failed may be made again."""

    def __init__(self, *tries: Sequence[Piece]) -> None:
        self.tries, self.clock, self.asked = list(tries), 100.0, []  # type: ignore[var-annotated]

    async def tried(self, attempt: Callable[[], Any]) -> Any:
        while True:
            try:
                return await attempt()
            except Passing:
                if not self.tries:
                    raise

    @asynccontextmanager
    async def stream(self, endpoint: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        self.asked.append((endpoint, body))
        yield SimpleNamespace(headers={"content-type": "text/event-stream"}, pieces=self.tries.pop(0))


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Exchange]:
    def answered(*tries: Sequence[Piece], prompt: Prompt = TEXT) -> Exchange:
        wire = Wire(*tries)

        async def events(response: Any) -> AsyncIterator[Any]:
            for seconds, content in response.pieces:
                wire.clock += seconds
                data = content if isinstance(content, str) else json.dumps(content)
                yield SimpleNamespace(event="message", data=data)

        monkeypatch.setattr(exchanging.httpx2, "EventSource", events)
        transport: Any = wire
        made = asyncio.run(exchange(transport, Defaults(), REQUEST, prompt, 4, "9", lambda: wire.clock))
        (endpoint, body) = wire.asked[-1]
        assert endpoint == ("chat/completions" if prompt.chat else "completions")
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        return made

    return answered


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": words}], **more}


def said(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


def test_an_answer_is_timed_from_its_request_to_its_last_piece(answered: Callable[..., Exchange]) -> None:
    """Two steps of several tokens, a piece without text, and the server's count two seconds behind the last one."""
    made = answered(
        [(0.5, text("a")), (0.25, text("")), (0.75, text("bc")), (1.5, text("d")), (2.0, usage(7)), (1, "[DONE]")]
    )
    assert (made.prompt, made.text, made.tokens, made.counted) == (4, "abcd", 7, True)
    assert (made.first, made.last) == (0.5, 3.0)
    assert made.gaps == [1.0, 1.5]
    assert made.per_token == pytest.approx(2.5 / 6)
    assert made.acceptance is None


def test_pieces_are_counted_where_the_server_does_not(answered: Callable[..., Exchange]) -> None:
    made = answered([(0.5, text("a")), (1.0, text("b")), (1.0, {"choices": [], "usage": {"completion_tokens": None}})])
    assert (made.tokens, made.counted, made.per_token) == (2, False, 1.0)
    one = answered([(0.5, text("a"))])
    assert (one.tokens, one.first, one.last, one.gaps, one.per_token) == (1, 0.5, 0.5, [], None)


def test_a_try_that_failed_is_not_timed(answered: Callable[..., Exchange]) -> None:
    """Sixty seconds went by before the server broke off; the second try took one."""
    broken = [(60.0, text("a")), (1.0, {"error": {"message": "out of memory"}})]
    made = answered(broken, [(0.5, text("b")), (0.5, text("c"))])
    assert (made.text, made.first, made.last, made.gaps) == ("bc", 0.5, 1.0, [0.5])
    with pytest.raises(Passing, match="the server broke off.*out of memory"):
        answered(broken)
    with pytest.raises(Passing, match="no completion in a piece of the stream"):
        answered([(1.0, "no json")])
    with pytest.raises(Refused, match="the answer is empty"):
        answered([(1.0, text("")), (1.0, usage(0))])


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "content"])
def test_thoughts_are_tokens_that_users_wait_for(answered: Callable[..., Exchange], name: str) -> None:
    made = answered(
        [(0.5, said(role="assistant")), (0.5, said(**{name: "th"})), (2.0, said(content="x")), (1.0, usage(3))],
        prompt=CHAT,
    )
    assert (made.text, made.first, made.last, made.tokens) == ("thx", 1.0, 3.0, 3)


def test_drafts_of_an_answer_are_its_own(answered: Callable[..., Exchange]) -> None:
    histogram = {"2": [1, 1, 1]}
    own = {"num_spec_tokens": 2, "num_spec_steps": 3, "num_accepted_draft_tokens": 3}
    metrics = {"speculative_decoding": own | {"acceptance_histogram_by_draft_length": histogram}}
    made = answered([(0.5, text("a")), (0.5, usage(6) | {"metrics": metrics})])
    counts = made.acceptance
    assert counts is not None
    assert (counts.steps, counts.emitted) == (3, 6)
    assert (counts.tested_D.tolist(), counts.passed_D.tolist()) == ([3, 2], [2, 1])
    assert Exchange(**json.loads(json.dumps(made.to_dict()))) == made


def test_the_first_turn_is_asked() -> None:
    assert question(Prompt("0", "all", ("say", "more"), chat=False)) == ("completions", {"prompt": "say"})
    endpoint, body = question(Prompt("0", "all", ("say", "more"), chat=True, system="be short"))
    assert endpoint == "chat/completions"
    assert body["messages"] == [{"role": "system", "content": "be short"}, {"role": "user", "content": "say"}]
