"""One answer of a server, streamed and timed.

Read next: `blocks.py`, which asks for many side by side.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx2
import numpy as np

from ...data.generate.server_request import ServerRequest
from ...data.generate.transport import Passing, Refused, Transport
from ...data.prompts import Prompt
from ..measure.metrics import Counts
from .counters import counts_of_answer

Clock = Callable[[], float]


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
    transport: Transport, request: ServerRequest, prompt: Prompt, number: int, stream: str, clock: Clock
) -> Exchange:
    """Ask for the answer to a prompt's first turn, and time its pieces; a try that failed is not timed.

    Args:
        number: of the prompt.
        stream: names the answer, and with the seed gives its random numbers.

    Raises:
        Refused, EnvironmentFailure, WrongServer: as of `Transport.tried`.
    """
    endpoint, asked = question(prompt)
    body = request.sampling(stream) | asked | {"stream": True, "stream_options": {"include_usage": True}}

    async def attempt() -> Exchange:
        pieces = _Pieces(clock)
        async with transport.stream(endpoint, body) as response:
            await pieces.read(response)
        return pieces.exchange(number)

    return await transport.tried(attempt)


def question(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """The endpoint for a prompt's first turn, and how its body says it: the server writes the template."""
    if not prompt.chat:
        return "completions", {"prompt": prompt.turns[0]}
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    return "chat/completions", {"messages": [*system, {"role": "user", "content": prompt.turns[0]}]}


class _Pieces:
    """The pieces of one answer as they come."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._start = clock, clock()
        self._texts: list[str] = []
        self._times: list[float] = []
        self._usage: Mapping[str, Any] = {}
        self._counts: Counts | None = None

    async def read(self, response: httpx2.Response) -> None:
        try:
            async for event in httpx2.EventSource(response):
                if event.data.strip() != "[DONE]":
                    self._judge(event.data)
        except httpx2.SSEError as error:
            raise Passing(f"the answer is no stream of events ({error})") from error

    def _judge(self, data: str) -> None:
        try:
            self._take(json.loads(data))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Passing(f"no completion in a piece of the stream ({type(error).__name__}: {error})") from error

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise Passing(f"the server broke off: {json.dumps(chunk['error']):.200}")
        self._usage = chunk.get("usage") or self._usage
        self._counts = counts_of_answer(chunk.get("metrics")) or self._counts
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else _spoken(delta)
            if text:
                self._texts.append(text)
                self._times.append(self._clock())

    def exchange(self, number: int) -> Exchange:
        if not self._times:
            raise Refused("the answer is empty")
        counted = self._usage.get("completion_tokens")
        whole = isinstance(counted, int)
        gaps = np.diff(self._times).tolist()
        counts = None if self._counts is None else {k: _plain(v) for k, v in vars(self._counts).items()}
        return Exchange(
            number,
            "".join(self._texts),
            int(counted) if isinstance(counted, int) else len(self._times),
            whole,
            self._times[0] - self._start,
            self._times[-1] - self._start,
            gaps,
            counts,
        )


def _spoken(delta: Mapping[str, Any]) -> str:
    """The text of a chat's piece, thoughts included: they are tokens that were decoded."""
    return "".join(delta.get(name) or "" for name in ("reasoning_content", "reasoning", "content"))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


now: Clock = time.perf_counter
