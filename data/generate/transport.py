"""HTTP to a server with OpenAI's endpoints: the user's key, time limits, retries, and who is to blame.

What may pass (429, 5xx, a lost connection, no answer in time, an answer that cannot be read) is tried
again, later and later, or when the server asks (`Retry-After`, ten minutes at most); anything else of 4xx is
final. The key comes from OPENAI_API_KEY and is written nowhere.
Read next: `server.py`, which asks for rows' answers; `eval/server/`, which measures and audits servers.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from math import isnan
from typing import Any, Self, TypeVar

import httpx2

from ...errors import EnvironmentFailure, RequestError
from .answers import NoAnswer
from .server_request import ServerRequest

KEY = "OPENAI_API_KEY"
_LONGEST_WAIT = 60.0  # seconds; waits double up to it
_LONGEST_ASKED = 600.0  # seconds; a server that asks for more is asked again then
_SHOWN = 300  # characters of a server's reply that a message quotes
# statuses that no row is to blame for: the address, the key or the model are wrong
_HOPELESS = (401, 402, 403, 404, 405)
Result = TypeVar("Result")


class Refused(NoAnswer):
    """A request that the server did not answer; whether the row or the server is to blame is open."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__("server", reason)
        self.status = status


class WrongServer(RequestError):
    """The address, the key or the model are refused, whatever is asked."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Passing(Exception):  # noqa: N818 - no failure yet
    """What may go better the next time; `wait`: seconds that the server asks for."""

    def __init__(self, reason: str, *, wait: float | None = None, answered: bool = True) -> None:
        super().__init__(reason)
        self.wait, self.answered = wait, answered


class Transport:
    """Connections to one server; use it as an asynchronous context."""

    def __init__(self, request: ServerRequest) -> None:
        self._request = request
        self._key = os.environ.get(KEY) or None
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._http = httpx2.AsyncClient(
            headers=headers, timeout=request.timeout, limits=httpx2.Limits(max_connections=request.concurrency)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def tried(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """The result of an attempt, made again while `Passing` says that it may go better.

        Raises:
            Refused: it did not, or the server refuses the request. EnvironmentFailure: nobody is there.
            WrongServer: the address, the key or the model are refused.
        """
        tries = self._request.retries + 1
        for retry in range(tries):
            try:
                return await attempt()
            except Passing as problem:
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

    async def post(self, endpoint: str, body: dict[str, Any]) -> httpx2.Response:
        """One attempt: the whole answer of an endpoint."""
        async with self._exchange("POST", f"{self._request.base_url}/{endpoint}", body) as response:
            await response.aread()
            self._judge(response)
            return response

    @asynccontextmanager
    async def stream(self, endpoint: str, body: dict[str, Any]) -> AsyncIterator[httpx2.Response]:
        """One attempt: an answer that is read as it comes."""
        async with self._exchange("POST", f"{self._request.base_url}/{endpoint}", body) as response:
            if not response.is_success:
                await response.aread()
            self._judge(response)
            yield response

    async def page(self, url: str) -> str | None:
        """One attempt: the text of a page beside the endpoints; None where the server has none to show."""
        async with self._exchange("GET", url, None) as response:
            await response.aread()
            if response.status_code >= 500 or response.status_code == 429:
                self._judge(response)
            return response.text if response.is_success else None

    def shown(self, text: str) -> str:
        """The start of the server's message, without the key in case it repeats it, and fit for a terminal."""
        if self._key:
            text = text.replace(self._key, "...")
        text = "".join(each if each.isprintable() else " " for each in text)
        return " ".join(text.split())[:_SHOWN] or "nothing"

    @asynccontextmanager
    async def _exchange(self, method: str, url: str, body: dict[str, Any] | None) -> AsyncIterator[httpx2.Response]:
        """A response whose head has come; what goes wrong with the connection is `Passing`."""
        try:
            async with self._http.stream(method, url, json=body) as response:
                yield response
        except httpx2.ConnectTimeout as error:
            raise Passing("no connection in time", answered=False) from error
        except httpx2.TimeoutException as error:
            raise Passing(f"no answer within {self._request.timeout:g} s") from error
        except (httpx2.ConnectError, httpx2.ProxyError) as error:
            raise Passing(f"no connection ({error})", answered=False) from error
        except httpx2.RequestError as error:
            raise Passing(f"the connection broke ({type(error).__name__}: {error})") from error

    def _judge(self, response: httpx2.Response) -> None:
        status = response.status_code
        if 200 <= status < 300:
            return
        reason = f"status {status}: {self.shown(response.text)}"
        if status == 429 or status == 408 or status >= 500:
            raise Passing(reason, wait=_retry_after(response.headers.get("Retry-After")))
        if status < 400:
            location = response.headers.get("Location", "nowhere")
            raise RequestError(f"{self._request.public_url} answers with {reason}; it leads to {location}: name that")
        if status in _HOPELESS:
            key = "is set" if self._key else "is not set"
            raise WrongServer(
                f"{self._request.public_url} answers with {reason}; check --server, --model "
                f"{self._request.model!r} and the environment variable {KEY}, which {key}",
                status,
            )
        raise Refused(reason, status)

    def _wait(self, retry: int, asked: float | None) -> float:
        """What the server asked for; else doubling, spread so that requests do not come in step."""
        if asked is not None:
            return asked
        longest = min(_LONGEST_WAIT, self._request.first_wait * 2**retry)
        return longest * random.uniform(0.5, 1)


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait by a Retry-After header, which holds seconds or a date; ten minutes at most."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return None if isnan(seconds) else min(max(0.0, seconds), _LONGEST_ASKED)
