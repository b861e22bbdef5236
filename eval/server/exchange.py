"""One answer of a server, streamed and timed.

Read next: `measure.py`, which asks for many side by side.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx2
import numpy as np

from ...data.generate.server_defaults import Defaults
from ...data.generate.server_request import ServerRequest, read_message, told_tokens
from ...data.generate.transport import Passing, Refused, Transport
from ...data.prompts import Prompt
from ..measure.metrics import Counts
from .counters import counts_of_answer

Clock = Callable[[], float]
_EVENTS = "text/event-stream"
_UNNAMED = (_EVENTS, "", "text/plain", "application/octet-stream", "application/x-ndjson")
"""What a stream of events is called by servers, and by gateways that do not know it."""


@dataclass(frozen=True)
class Exchange:
    """A request and its answer. Times in seconds, from when the request is sent."""

    prompt: int
    """Number of the prompt."""
    text: str
    tokens: int
    """As the server counts them; the pieces of the stream where it does not."""
    counted: bool
    """Whether it does."""
    first: float
    """Until the first piece of text."""
    last: float
    """Until the last one."""
    gaps: list[float] = field(default_factory=list)
    """Between one piece and the next; a step that accepts several tokens sends one piece."""
    counts: dict[str, Any] | None = None
    """What the server's drafter did for this answer, if it says so."""

    @property
    def per_token(self) -> float | None:
        """Seconds per token behind the first; None for an answer of one token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def acceptance(self) -> Counts | None:
        """`counts` as the measures take them."""
        if self.counts is None:
            return None
        arrays = {name: np.array(value) for name, value in self.counts.items() if isinstance(value, list)}
        return Counts(**(self.counts | arrays))

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return asdict(self)


async def exchange(
    transport: Transport,
    defaults: Defaults,
    request: ServerRequest,
    prompt: Prompt,
    number: int,
    stream: str,
    clock: Clock,
) -> Exchange:
    """Ask for the answer to a prompt's first turn, and time its pieces; a try that failed is not timed.

    Args:
        defaults: which of its own this server is told to leave off.
        number: of the prompt.
        stream: names the answer, and with the seed gives its random numbers.

    Raises:
        Refused, EnvironmentFailure, WrongServer: as of `Transport.tried`.
    """
    endpoint, asked = question(prompt, request.template_values)

    async def attempt(off: tuple[str, ...]) -> Exchange:
        body = request.sampling(stream, off) | asked | {"stream": True, "stream_options": {"include_usage": True}}

        async def once() -> Exchange:
            pieces = StreamedPieces(clock)
            async with transport.stream(endpoint, body) as response:
                await pieces.read(response)
            return pieces.exchange(number)

        return await transport.tried(once)

    return await defaults.ask(attempt)


def identity_of(server: ServerRequest, prompt: Prompt) -> dict[str, Any]:
    """Which server is asked, and with which variables of its chat template, if any: what kept answers hang on."""
    values = prompt.template_values if server.template_values is None else server.template_values
    named = {"template_values": dict(values)} if values else {}
    return {"url": server.public_url, "model": server.model, **named}


def question(prompt: Prompt, template_values: Mapping[str, object] | None = None) -> tuple[str, dict[str, Any]]:
    """The endpoint for a prompt's first turn, and how its body says it: the server writes the template.

    Args:
        template_values: variables of the template in place of the prompt's own.
    """
    if not prompt.chat:
        return "completions", {"prompt": prompt.turns[0]}
    tools = {} if prompt.tools is None else {"tools": prompt.tools}
    values = prompt.template_values if template_values is None else template_values
    told = {} if not values else {"chat_template_kwargs": dict(values)}
    return "chat/completions", {"messages": prompt.before(0), **tools, **told}


class StreamedPieces:
    """The pieces of one answer as they come."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._start = clock, clock()
        self._texts: list[str] = []
        self._times: list[float] = []
        self._tokens: int | None = None
        self._metrics: Any = None
        self._timings: Any = None

    async def read(self, response: httpx2.Response) -> None:
        """Take what comes; a server that does not stream sends one piece.

        Raises:
            Passing: it is no answer.
        """
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json":
            self._judge((await response.aread()).decode("utf-8", "replace"))
            return
        if kind in _UNNAMED:
            # events are UTF-8, whatever a gateway calls them
            response.headers["content-type"] = _EVENTS
        try:
            async for event in httpx2.EventSource(response):
                if event.event == "error":
                    raise Passing(f"the server broke off: {event.data:.200}")
                if event.data.strip() not in ("", "[DONE]"):
                    self._judge(event.data)
        except httpx2.SSEError as error:
            raise Passing(f"the answer is no stream of events ({error})") from error

    def _judge(self, data: str) -> None:
        try:
            self._take(json.loads(data))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Passing(f"no completion in a piece of the stream ({type(error).__name__}: {error})") from error

    def _take(self, chunk: dict[str, Any]) -> None:
        if chunk.get("error"):
            raise Passing(f"the server broke off: {json.dumps(chunk['error']):.200}")
        self._tokens = told_tokens(chunk.get("usage"), "completion_tokens") or self._tokens
        self._metrics = chunk.get("metrics") or self._metrics
        self._timings = chunk.get("timings") or self._timings
        for choice in chunk.get("choices") or []:
            text = _decoded(choice)
            if text:
                self._texts.append(text)
                self._times.append(self._clock())

    def exchange(self, number: int) -> Exchange:
        """The whole answer.

        Raises:
            Refused: nothing came.
        """
        if not self._times:
            raise Refused("the answer is empty")
        found = counts_of_answer(self._metrics, self._timings)
        return Exchange(
            number,
            "".join(self._texts),
            len(self._times) if self._tokens is None else self._tokens,
            self._tokens is not None,
            self._times[0] - self._start,
            self._times[-1] - self._start,
            np.diff(self._times).tolist(),
            None if found is None else {name: _plain(value) for name, value in vars(found).items()},
        )


def _decoded(choice: Mapping[str, Any]) -> str:
    """The text of a piece; of a chat's thoughts and calls of tools too: they are tokens that were decoded."""
    message = choice.get("delta") or choice.get("message")
    if isinstance(message, Mapping):
        return read_message(message).decoded
    text = choice.get("text")
    return text if isinstance(text, str) else ""


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


now: Clock = time.perf_counter
