"""Answers by a server with OpenAI's endpoints: chats and texts, side by side, and rows that are refused.

Chats go to `chat/completions`, texts to `completions`.
Read next: `transport.py`, retries and the key; `answers.py`; `decoded.py`, the same by our own decoder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx2

from ...errors import EnvironmentFailure
from ..rows.raw import Rejected
from ..rows.records import Placed
from .answers import Ask, Asker, Dialogue, NoAnswer, Reply
from .journal import Journal
from .server_defaults import Defaults, left_on
from .server_request import Message, ServerRequest, read_message, told_tokens
from .transport import Passing, Refused, Transport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


class Client:
    """Asks one turn; use it as an asynchronous context."""

    def __init__(
        self,
        request: ServerRequest,
        tokenizer: PreTrainedTokenizerBase,
        settled: Callable[[tuple[str, ...]], None] = lambda _: None,
    ) -> None:
        """Begin.

        Args:
            tokenizer: counts the tokens of an answer whose server does not.
            settled: is told which of its own defaults the server was told to leave off.
        """
        self._request, self._tokenizer = request, tokenizer
        self._transport, self._defaults = Transport(request), Defaults(settled)
        self._counts_here = False

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
        endpoint, own = self._question(ask)

        async def attempt(off: tuple[str, ...]) -> Reply:
            body = self._request.sampling(stream, off) | own

            async def once() -> Reply:
                return self._read(await self._transport.post(endpoint, body), chat=ask.messages is not None)

            return await self._transport.tried(once)

        return await self._defaults.ask(attempt)

    def _question(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        if ask.messages is None:
            return "completions", {"prompt": ask.text}
        tools = {} if ask.tools is None else {"tools": ask.tools}
        return "chat/completions", {"messages": ask.messages} | tools | self._request.for_template()

    def _read(self, response: httpx2.Response, *, chat: bool) -> Reply:
        try:
            content = response.json()
            choice = content["choices"][0]
            told = read_message(choice["message"]) if chat else Message(choice.get("text"), "", False, "")
            reason, usage = choice.get("finish_reason"), content.get("usage")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Passing(f"no completion in the answer: {self._transport.shown(response.text)}") from error
        count = told_tokens(usage, "completion_tokens") or self._count(told)
        # some say nothing of it: then the limit tells
        ended = _ENDED.get(str(reason).lower()) if reason else count < self._request.max_new_tokens
        if ended is None:
            raise NoAnswer("answer", f"the server ended the answer by {reason!r:.40}")
        return _reply(told, ended, count)

    def _count(self, told: Message) -> int:
        """Tokens of an answer whose server does not say how many they are."""
        if not self._counts_here:
            self._counts_here = True
            _log.info(
                "%s does not say how many tokens an answer has: they are counted by the target's tokenizer",
                self._request.public_url,
            )
        return len(self._tokenizer(told.decoded, add_special_tokens=False, verbose=False)["input_ids"])


_ENDED = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence"), True),
    **dict.fromkeys(("length", "max_tokens", "max_length"), False),
}
"""Whether an answer ended by itself, by the names that servers have for it."""


def _reply(told: Message, ended: bool, tokens: int) -> Reply:
    """The answer; asking again would not make another one of what is none.

    Raises:
        NoAnswer: there is none that could be kept.
    """
    if told.calls:
        raise NoAnswer("answer", "the target calls a tool, which nobody runs")
    if told.withheld:
        raise NoAnswer("answer", "the server keeps the target's thoughts back: they are summarised or encrypted")
    if not isinstance(told.text, str | None):
        raise NoAnswer("answer", f"the server's text is a {type(told.text).__name__}")
    if not (told.text or "").strip():
        if not ended and told.thoughts:
            return Reply("", tokens, ended, reasoning=told.thoughts)
        if not ended:
            raise NoAnswer("cut", f"the answer was cut off after {tokens} tokens")
        raise NoAnswer("empty", "the answer is empty" + (", its thoughts apart" if told.thoughts else ""))
    return Reply(told.text or "", tokens, ended, reasoning=told.thoughts or None)


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

    def settled(off: tuple[str, ...]) -> None:
        journal.settle("told_off", list(off), "a server that lets the same be switched off")
        if (sentence := left_on(off)) is not None:
            _log.warning("%s: %s", request.public_url, sentence)

    async with Client(request, asker.tokenizer, settled) as client, asyncio.TaskGroup() as group:
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
