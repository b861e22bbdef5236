"""Requests in blocks: so many at a time or so many a second, at one server and then at the other.

A block is sent to both servers, the first one in turns, so that a slow minute hits both; their counters
are looked at before and after. Read next: `measure.py`, which plans blocks; `exchange.py`, one answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ...data.generate.server_defaults import Defaults
from ...data.generate.server_request import ServerRequest
from ...data.generate.transport import Passing, Refused, Transport
from ...data.prompts import Prompt
from .counters import ServerCounters, read_counters
from .exchange import Exchange, exchange, now

PER_PLACE = 4  # requests of a block for each that is under way at a time
_AT_A_RATE = 16  # requests of a block that arrive by the clock


@dataclass(frozen=True)
class Load:
    """How requests come: so many under way at a time, or so many a second whatever is under way."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        """`8 at a time`, `2.5 a second`."""
        return f"{self.rate:g} a second" if self.concurrency is None else f"{self.concurrency} at a time"

    @property
    def block(self) -> int:
        """Requests of a block: enough for the load to be there for most of it."""
        return _AT_A_RATE if self.concurrency is None else PER_PLACE * self.concurrency

    @property
    def warm_up(self) -> int:
        """Requests before the first block that count nowhere."""
        return self.concurrency or 4


@dataclass(frozen=True)
class Numbered:
    """A request of a block."""

    number: int
    """In the whole measurement: it names the random numbers."""
    prompt: int
    """Which of the prompts."""


@dataclass
class Half:
    """A block at one server."""

    exchanges: list[Exchange] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """The requests' numbers, in the order of `exchanges`."""
    refused: list[str] = field(default_factory=list)
    """Why a request has no answer."""
    seconds: float = 0.0
    """From the first request's start to the last answer's end."""
    counted: ServerCounters | None = None
    """What the server counted meanwhile."""
    off: list[str] | None = None
    """Which of its own defaults the server was told to leave off; None of an earlier version's journal."""

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(each.tokens for each in self.exchanges)

    @property
    def waited(self) -> float:
        """Seconds of all answers together, one after another."""
        return sum(each.last for each in self.exchanges)

    def to_dict(self) -> dict[str, Any]:
        """As the journal keeps it."""
        counted = None if self.counted is None else self.counted.to_dict()
        return vars(self) | {"exchanges": [each.to_dict() for each in self.exchanges], "counted": counted}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Of `to_dict`."""
        exchanges = [Exchange(**each) for each in content["exchanges"]]
        counted = None if content["counted"] is None else ServerCounters.from_dict(content["counted"])
        return cls(**{**content, "exchanges": exchanges, "counted": counted})


class AskedServer:
    """One of the two servers, ready to be asked."""

    def __init__(
        self,
        request: ServerRequest,
        prompts: Sequence[Prompt],
        settled: Callable[[tuple[str, ...]], None] = lambda _: None,
    ) -> None:
        """`settled` is told which of its own defaults the server was told to leave off."""
        self.request, self.transport, self.defaults = request, Transport(request), Defaults(settled)
        self._prompts = prompts

    async def counters(self) -> ServerCounters | None:
        """The server's counters now; None where it shows none, whatever the reason."""
        try:
            page = await self.transport.page(self.request.page_url("metrics"))
        except (Passing, Refused):
            return None
        return None if page is None else read_counters(page)

    async def half(self, requests: Sequence[Numbered], load: Load, request: ServerRequest, *, seed: int) -> Half:
        """Send the requests under a load, and take down what comes.

        Args:
            request: this server's, with the distribution to ask for.
            seed: of the arrivals, which are the same for both servers.
        """
        half = Half()
        before = await self.counters()
        start = now()
        if load.concurrency is None:
            await self._arriving(requests, load.rate or 1.0, request, half, seed)
        else:
            waiting = iter(requests)
            async with asyncio.TaskGroup() as group:
                for _ in range(load.concurrency):
                    group.create_task(self._in_turn(waiting, request, half))
        half.seconds = now() - start
        after = await self.counters()
        half.counted = None if before is None or after is None else after.since(before)
        half.off = list(self.defaults.off)
        return half

    async def _in_turn(self, waiting: Iterator[Numbered], request: ServerRequest, half: Half) -> None:
        for each in waiting:
            await self._one(each, request, half)

    async def _arriving(
        self, requests: Sequence[Numbered], rate: float, request: ServerRequest, half: Half, seed: int
    ) -> None:
        """Requests that come independently of each other: the gaps between them are exponential."""
        gaps = np.random.default_rng(seed).exponential(1 / rate, len(requests))
        begin = now()
        async with asyncio.TaskGroup() as group:
            for each, due in zip(requests, np.cumsum(gaps) - gaps[0], strict=True):
                await asyncio.sleep(max(0.0, begin + float(due) - now()))
                group.create_task(self._one(each, request, half))

    async def _one(self, each: Numbered, request: ServerRequest, half: Half) -> None:
        prompt = self._prompts[each.prompt]
        try:
            done = await exchange(self.transport, self.defaults, request, prompt, each.prompt, str(each.number), now)
        except Refused as refused:
            half.refused.append(str(refused))
            return
        half.exchanges.append(done)
        half.numbers.append(each.number)
