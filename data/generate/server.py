"""Answers by a server with OpenAI's endpoints: chats and texts, side by side, and rows that are refused.

Chats go to `chat/completions`, texts to `completions`.
Read next: `transport.py`, retries and the key; `answers.py`; `decoded.py`, the same by our own decoder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx2

from ...errors import EnvironmentFailure
from ..rows.raw import Rejected
from ..rows.records import Placed
from .answers import Ask, Asker, Dialogue, NoAnswer, Reply
from .journal import Journal
from .server_request import ServerRequest
from .transport import Passing, Refused, Transport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Client:
    """Asks one turn; use it as an asynchronous context."""

    def __init__(self, request: ServerRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        """`tokenizer`: counts the tokens of an answer whose server does not."""
        self._request, self._tokenizer = request, tokenizer
        self._transport = Transport(request)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._transport.__aexit__()

    async def reply(self, ask: Ask, stream: str) -> Reply:
        """The server's answer; `stream` names the turn, and with the seed its random numbers.

        Raises:
            Refused: not this row. EnvironmentFailure: nobody is there. RequestError: the address,
            the key or the model are refused, whatever the row.
        """
        endpoint, body = self._body(ask, stream)

        async def attempt() -> Reply:
            return self._read(await self._transport.post(endpoint, body), chat=ask.messages is not None)

        return await self._transport.tried(attempt)

    def _body(self, ask: Ask, stream: str) -> tuple[str, dict[str, Any]]:
        body = self._request.sampling(stream)
        if ask.messages is None:
            return "completions", body | {"prompt": ask.text}
        tools = {} if ask.tools is None else {"tools": ask.tools}
        return "chat/completions", body | {"messages": ask.messages} | tools

    def _read(self, response: httpx2.Response, *, chat: bool) -> Reply:
        try:
            content = response.json()
            choice = content["choices"][0]
            answer = choice["message"] if chat else choice
            text = answer.get("content" if chat else "text")
            reason, usage = choice["finish_reason"], content.get("usage") or {}
            reasoning = answer.get("reasoning_content") if chat else None
            tokens = usage.get("completion_tokens")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Passing(f"no completion in the answer: {self._transport.shown(response.text)}") from error
        if chat and answer.get("tool_calls"):
            raise NoAnswer("answer", "the target calls a tool, which nobody runs")
        if reason not in ("stop", "length"):
            raise NoAnswer("answer", f"the server ended the answer by {reason!r:.40}")
        if not isinstance(text, str) or not isinstance(reasoning, str | None):
            raise Passing(f"no text in the answer: {self._transport.shown(response.text)}")
        if not isinstance(tokens, int):
            tokens = len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return Reply(text, tokens, reason == "stop", reasoning=reasoning or None)


def answer_rows(rows: Iterable[Placed | Rejected], asker: Asker, request: ServerRequest, journal: Journal) -> None:
    """Answer every row of the source that the journal does not hold yet.

    Raises:
        EnvironmentFailure: nobody answers, or one row after the other is refused.
        RequestError: address, key or model are refused.
    """
    try:
        asyncio.run(_answer_rows(enumerate(rows), asker, request, journal))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _answer_rows(
    rows: Iterator[tuple[int, Placed | Rejected]], asker: Asker, request: ServerRequest, journal: Journal
) -> None:
    doubt = _Doubt(journal, limit=max(8, 2 * request.concurrency))

    async def work(client: Client) -> None:
        for number, row in rows:
            if number not in journal:
                dialogue = asker.open(number, row)
                answered = await _converse(dialogue, asker, client)
                doubt.add(asker.entry(dialogue), answered)

    async with Client(request, asker.tokenizer) as client, asyncio.TaskGroup() as group:
        for _ in range(request.concurrency):
            group.create_task(work(client))
    doubt.close()


async def _converse(dialogue: Dialogue, asker: Asker, client: Client) -> bool | None:
    """All turns of a row; whether the server answered, None where it was not asked."""
    answered: bool | None = None
    while dialogue.talking:
        ask = asker.ask(dialogue)
        if ask is None:
            break
        try:
            reply = await client.reply(ask, f"{dialogue.number}:{len(dialogue.replies)}")
        except NoAnswer as reason:
            asker.refuse(dialogue, reason)
            return not isinstance(reason, Refused)
        answered = True
        asker.hear(dialogue, reply)
    return answered


@dataclass
class _Doubt:
    """Holds refused rows back until the server answers another one: then the rows were to blame.

    When it never does, they are not written down, and a later start asks for them again.
    """

    journal: Journal
    limit: int
    held: list[dict[str, Any]] = field(default_factory=list)

    def add(self, entry: dict[str, Any], answered: bool | None) -> None:
        if answered is False:
            self.held.append(entry)
            if len(self.held) >= self.limit:
                raise self._failure()
            return
        if answered:
            self._settle()
        self.journal.add([entry])

    def close(self) -> None:
        """The end of the source: the last refusals count, unless the server answered nothing."""
        if self.held and not self.journal.answered:
            raise self._failure()
        self._settle()

    def _settle(self) -> None:
        self.journal.add(self.held)
        self.held = []

    def _failure(self) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"the server refused {len(self.held)} row(s) one after the other, the last one with: "
            f"{self.held[-1]['rejected']['reason']}. They are not counted as rejected: see to the "
            "server, then run the same command again"
        )
