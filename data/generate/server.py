"""Answers by a server with OpenAI's endpoints: requests side by side, retries, refusals.

Chats go to `chat/completions`, texts to `completions`. What may pass (429, 5xx, a lost connection,
no answer in time, an answer that cannot be read) is tried again, later and later, or when the
server asks (`Retry-After`); anything else of 4xx is final. The key comes from OPENAI_API_KEY and is
written nowhere. Read next: `answers.py`; `decoded.py`, the same by our own decoder.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import httpx2

from ...errors import EnvironmentFailure, RequestError
from ..rows.raw import Rejected
from ..rows.records import Placed
from .answers import Ask, Asker, Dialogue, NoAnswer, Reply
from .journal import Journal
from .server_request import ServerRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "OPENAI_API_KEY"
_LONGEST_WAIT = 60.0  # seconds; waits double up to it
_SHOWN = 300  # characters of a server's reply that a message quotes
# statuses that no row is to blame for: the address, the key or the model are wrong
_HOPELESS = (401, 402, 403, 404, 405)
_log = logging.getLogger(__name__)


class Refused(NoAnswer):
    """A row that the server did not answer; whether the row or the server is to blame is open."""

    def __init__(self, reason: str) -> None:
        super().__init__("server", reason)


class _Passing(Exception):  # noqa: N818 - no failure yet
    """What may go better the next time; `wait`: seconds that the server asks for."""

    def __init__(self, reason: str, *, wait: float | None = None, answered: bool = True) -> None:
        super().__init__(reason)
        self.wait, self.answered = wait, answered


class Client:
    """Asks one turn; use it as an asynchronous context."""

    def __init__(self, request: ServerRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        """`tokenizer`: counts the tokens of an answer whose server does not."""
        self._request, self._tokenizer = request, tokenizer
        self._key = os.environ.get(KEY) or None
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._http = httpx2.AsyncClient(
            headers=headers, timeout=request.timeout, limits=httpx2.Limits(max_connections=request.concurrency)
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def reply(self, ask: Ask, stream: str) -> Reply:
        """The server's answer; `stream` names the turn, and with the seed its random numbers.

        Raises:
            Refused: not this row. EnvironmentFailure: nobody is there. RequestError: the address,
            the key or the model are refused, whatever the row.
        """
        endpoint, body = self._body(ask, stream)
        tries = self._request.retries + 1
        for retry in range(tries):
            try:
                return self._read(await self._post(endpoint, body), chat=ask.messages is not None)
            except _Passing as problem:
                last = problem
            if retry + 1 < tries:
                await asyncio.sleep(self._wait(retry, last.wait))
        times = "once" if tries == 1 else f"{tries} times"
        if not last.answered:
            raise EnvironmentFailure(
                f"{self._request.public_url} was tried {times}: {last}. What is done is kept: "
                "start the server and run the same command again"
            )
        raise Refused(f"{last} (tried {times})")

    def _body(self, ask: Ask, stream: str) -> tuple[str, dict[str, Any]]:
        request = self._request
        body: dict[str, Any] = {
            "model": request.model,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_new_tokens,
        }
        if request.top_k:
            body["top_k"] = request.top_k  # not OpenAI's; a server without it refuses
        if request.temperature:
            body["seed"] = _seed(request.seed, stream)
        if ask.messages is None:
            return "completions", body | {"prompt": ask.text}
        tools = {} if ask.tools is None else {"tools": ask.tools}
        return "chat/completions", body | {"messages": ask.messages} | tools

    async def _post(self, endpoint: str, body: dict[str, Any]) -> httpx2.Response:
        try:
            response = await self._http.post(f"{self._request.base_url}/{endpoint}", json=body)
        except httpx2.ConnectTimeout as error:
            raise _Passing("no connection in time", answered=False) from error
        except httpx2.TimeoutException as error:
            raise _Passing(f"no answer within {self._request.timeout:g} s") from error
        except (httpx2.ConnectError, httpx2.ProxyError) as error:
            raise _Passing(f"no connection ({error})", answered=False) from error
        except httpx2.RequestError as error:
            raise _Passing(f"the connection broke ({type(error).__name__}: {error})") from error
        self._judge(response)
        return response

    def _judge(self, response: httpx2.Response) -> None:
        status = response.status_code
        if 200 <= status < 300:
            return
        reason = f"status {status}: {self._shown(response.text)}"
        if status == 429 or status == 408 or status >= 500:
            raise _Passing(reason, wait=_retry_after(response.headers.get("Retry-After")))
        if status < 400:
            location = response.headers.get("Location", "nowhere")
            raise RequestError(f"{self._request.public_url} answers with {reason}; it leads to {location}: name that")
        if status in _HOPELESS:
            key = "is set" if self._key else "is not set"
            raise RequestError(
                f"{self._request.public_url} answers with {reason}; check --server, --model "
                f"{self._request.model!r} and the environment variable {KEY}, which {key}"
            )
        raise Refused(reason)

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
            raise _Passing(f"no completion in the answer: {self._shown(response.text)}") from error
        if chat and answer.get("tool_calls"):
            raise NoAnswer("answer", "the target calls a tool, which nobody runs")
        if reason not in ("stop", "length"):
            raise NoAnswer("answer", f"the server ended the answer by {reason!r:.40}")
        if not isinstance(text, str) or not isinstance(reasoning, str | None):
            raise _Passing(f"no text in the answer: {self._shown(response.text)}")
        if not isinstance(tokens, int):
            tokens = len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return Reply(text, tokens, reason == "stop", reasoning=reasoning or None)

    def _wait(self, retry: int, asked: float | None) -> float:
        """What the server asked for; else doubling, spread so that requests do not come in step."""
        if asked is not None:
            return asked
        longest = min(_LONGEST_WAIT, self._request.first_wait * 2**retry)
        return longest * random.uniform(0.5, 1)

    def _shown(self, text: str) -> str:
        """The start of the server's message, without the key in case it repeats it."""
        if self._key:
            text = text.replace(self._key, "...")
        return " ".join(text.split())[:_SHOWN] or "nothing"


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


def _seed(seed: int, stream: str) -> int:
    """A turn's own seed, in the 31 bits that every server takes."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{stream}".encode()).digest()[:4], "big") >> 1


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait by a Retry-After header, which holds seconds or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
