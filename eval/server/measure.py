"""Measure a running server on the user's prompts, side by side with the same server without speculation.

Blocks that are done stand in the journal of `data/generate`, so a measurement that was stopped goes on
with the next one. Read next: `blocks.py`, a block; `rows.py`, which makes rows of results of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...bars import live
from ...data.generate.journal import Journal
from ...data.generate.server_request import ServerRequest
from ...data.prompts import Prompt
from ...errors import EnvironmentFailure
from ..config import EvalConfig
from ..measure.environment import environment
from .blocks import AskedServer, Half, Load, Numbered

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
        "servers": [{"url": each.public_url, "model": each.model} for each in servers],
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
    lines = (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return [_block(each, json.loads(line)) for each, line in zip(plans, lines, strict=True)]


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
