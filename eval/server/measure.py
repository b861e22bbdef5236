"""Measure a running server on the user's prompts, side by side with the same server without speculation.

Blocks that are done stand in the journal of `data/generate`, so a measurement that was stopped goes on
with the next one. Read next: `rows.py`, which makes rows of results of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...bars import live
from ...data.generate.journal import Journal
from ...data.generate.server_defaults import Defaults
from ...data.generate.server_request import ServerRequest
from ...data.generate.transport import Passing, Refused, Transport
from ...data.prompts import Prompt
from ...errors import EnvironmentFailure
from ...storage import json_lines
from ..config import EvalConfig
from ..measure.environment import environment
from .counters import ServerCounters, read_counters
from .exchange import Exchange, exchange, identity_of, now

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


FEWEST = 6
"""Blocks of a load: a bootstrap of fewer is too narrow."""
JOURNAL = "server-blocks"
_TOLD_OFF = ("told_off", "baseline_told_off")  # in the journal's manifest, of either server


@dataclass(frozen=True)
class BlockPlan:
    """One block: which requests, how they come, and at which temperature."""

    at: int
    """Of its load and temperature, from 0."""
    load: Load
    temperature: float
    requests: tuple[Numbered, ...]


@dataclass(frozen=True)
class Block:
    """A block that is done at the server, and at the one without speculation where there is one."""

    plan: BlockPlan
    own: Half
    baseline: Half | None


def plan(
    prompts: int, loads: Sequence[Load], temperatures: Sequence[float], *, requests: int | None
) -> list[BlockPlan]:
    """The blocks of a measurement, the prompts again and again until there are enough requests.

    Args:
        prompts: how many there are.
        requests: of a load and temperature, at least; None: every prompt once, and `FEWEST` blocks.
    """
    plans = []
    for temperature in temperatures:
        for load in loads:
            # a block that is smaller than the load would not be that load
            size = max(load.concurrency or 1, min(load.block, (requests or load.block * FEWEST) // FEWEST))
            count = max(FEWEST, -(-(requests or prompts) // size))
            for at in range(count):
                some = [Numbered(n, n % prompts) for n in range(at * size, (at + 1) * size)]
                plans.append(BlockPlan(at, load, temperature, tuple(some)))
    return plans


def measure_blocks(
    prompts: Sequence[Prompt],
    plans: Sequence[BlockPlan],
    servers: Sequence[ServerRequest],
    config: EvalConfig,
    out: Path,
) -> list[Block]:
    """All blocks, those of an earlier start included.

    Args:
        servers: the one that is measured, then the one without speculation if there is one.
        out: folder of the results; the journal stands in it.

    Raises:
        EnvironmentFailure: nobody is there, or all requests of a block are refused.
        RequestError: address, key or model are refused, or the journal is of another measurement.
    """
    settings = {
        "servers": [identity_of(each, prompts[0]) for each in servers],
        "prompts": {"source": config.prompts, "count": len(prompts)},
        "blocks": [_named(each) for each in plans],
        "sampling": {name: getattr(config, name) for name in ("top_k", "top_p", "min_p", "max_new_tokens", "seed")},
    }
    folder = out / JOURNAL
    with Journal(folder, settings, environment()) as journal:
        if not journal.complete:
            try:
                asyncio.run(_measure(prompts, plans, servers, config, journal))
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
            journal.publish()
    rows = json_lines(folder / "answers.jsonl")
    return [_block(plan, row) for plan, row in zip(plans, rows, strict=True)]


async def _measure(
    prompts: Sequence[Prompt],
    plans: Sequence[BlockPlan],
    servers: Sequence[ServerRequest],
    config: EvalConfig,
    journal: Journal,
) -> None:
    served = [
        AskedServer(each, prompts, partial(_settle, journal, name))
        for name, each in zip(_TOLD_OFF, servers, strict=False)
    ]
    warm: tuple[Load, float] | None = None
    with live("measuring", len(plans), " blocks") as line:
        line.update(len(journal))
        try:
            for number, each in enumerate(plans):
                if number in journal:
                    continue
                if warm != (each.load, each.temperature):
                    await _warm_up(served, each, config)
                    warm = (each.load, each.temperature)
                halves = await _halves(served, each, config, first=each.at % len(served))
                journal.add([_entry(number, halves)])
                line.update()
        finally:
            for server in served:
                await server.transport.__aexit__()


def _settle(journal: Journal, name: str, off: tuple[str, ...]) -> None:
    journal.settle(name, list(off), "servers that let the same be switched off")


async def _warm_up(served: Sequence[AskedServer], each: BlockPlan, config: EvalConfig) -> None:
    """Some of the block's requests, whose answers and times count nowhere."""
    some = replace(each, requests=each.requests[: each.load.warm_up])
    await _halves(served, some, config, first=0)


async def _halves(served: Sequence[AskedServer], each: BlockPlan, config: EvalConfig, *, first: int) -> list[Half]:
    """The block at every server, one after the other, beginning with `first`; in the order of the servers."""
    done: dict[int, Half] = {}
    for turn in range(len(served)):
        at = (first + turn) % len(served)
        server = served[at]
        request = replace(server.request, temperature=each.temperature)
        done[at] = await server.half(each.requests, each.load, request, seed=config.seed + each.at)
        if not done[at].exchanges:
            raise EnvironmentFailure(
                f"{request.public_url} answered none of {len(each.requests)} requests, the last one with: "
                f"{done[at].refused[-1]}. See to the server, then run the same command again: it goes on from there"
            )
    return [done[at] for at in range(len(served))]


def _entry(number: int, halves: Sequence[Half]) -> dict[str, Any]:
    """A line of the journal, with the sums that it adds up."""
    sums = {"tokens": halves[0].tokens, "turns": len(halves[0].exchanges)}
    zeros = dict.fromkeys(("cut", "retokenised", "steps", "emitted", "tested", "accepted"), 0)
    return {"row": number, "shape": "block", "answer": [each.to_dict() for each in halves], **sums, **zeros}


def _block(plan: BlockPlan, halves: Sequence[dict[str, Any]]) -> Block:
    own, *others = [Half.from_dict(each) for each in halves]
    return Block(plan, own, others[0] if others else None)


def _named(each: BlockPlan) -> str:
    return f"{each.load.label}, T = {each.temperature:g}, {len(each.requests)} from {each.requests[0].number}"
