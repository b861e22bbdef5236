"""Blocks on the test's own clock: who is under way when, which server is asked first, and what counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.data.generate.server_defaults import Defaults
from draftsmith.data.generate.server_request import ServerRequest
from draftsmith.data.generate.transport import Refused
from draftsmith.data.prompts import Prompt
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.server import measure
from draftsmith.eval.server.counters import ServerCounters
from draftsmith.eval.server.exchange import Exchange
from draftsmith.eval.server.measure import AskedServer, Block, Half, Load, Numbered, measure_blocks, plan
from helpers import virtual_clock

PROMPTS = [Prompt(str(n), "all", (f"prompt {n}",), chat=False) for n in range(5)]
CONFIG = EvalConfig(temperatures=[0.0], max_new_tokens=12, seed=3)


def asked(url: str = "http://own", **changes: Any) -> ServerRequest:
    return ServerRequest(url, "small", 0.0, 0, 1.0, 12, 7, concurrency=64, **changes)


class Machine:
    """Servers that answer a request after as many seconds as is planned for its number; 10 s where nothing is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: Mapping[int, float] = {}
        self.refused: set[int] = set()
        self.log: list[tuple[str, float, int, int, float]] = []
        """Server, when, number of the request, prompt, temperature: as they were asked."""
        self.busy = self.busiest = 0
        self.written = 1_000
        monkeypatch.setattr(measure, "now", virtual_clock.now)
        monkeypatch.setattr(measure, "exchange", self.exchange)
        monkeypatch.setattr(measure, "Transport", lambda _request: _Wire(self))
        monkeypatch.setattr(measure.asyncio, "run", virtual_clock.run)

    async def exchange(
        self, transport: Any, defaults: Any, request: Any, prompt: Prompt, at: int, stream: str, clock: Any
    ) -> Exchange:
        number = int(stream)
        assert prompt is PROMPTS[at]
        assert clock is virtual_clock.now
        assert isinstance(defaults, Defaults)
        self.log.append((request.public_url, clock(), number, at, request.temperature))
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        seconds = self.seconds.get(number, 10.0)
        await measure.asyncio.sleep(seconds)
        self.busy -= 1
        if number in self.refused:
            raise Refused(f"no room for {number}")
        self.written += 4
        return Exchange(at, f"{request.public_url} says {number}", 4, True, seconds / 4, seconds, [seconds / 4] * 3)

    def half(self, load: Load, numbers: Sequence[int], *, seed: int = 0) -> Half:
        async def one() -> Half:
            requests = [Numbered(n, n % len(PROMPTS)) for n in numbers]
            return await AskedServer(asked(), PROMPTS).half(requests, load, asked(), seed=seed)

        return virtual_clock.run(one())

    def started(self, url: str = "http://own/v1") -> dict[int, float]:
        return {number: when for server, when, number, _, _ in self.log if server == url}


class _Wire:
    """What is left of a transport: the page of counters."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def page(self, _url: str) -> str:
        return f'vllm:generation_tokens_total{{engine="0"}} {self._machine.written}\n'

    async def __aexit__(self, *_: object) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_so_many_are_under_way_at_a_time(machine: Machine) -> None:
    """Three of seven: the next one starts when one is done; the block lasts until the last one is."""
    machine.seconds = {0: 10.0, 1: 3.0, 2: 6.0, 3: 2.0, 4: 20.0, 5: 1.0, 6: 1.0}
    half = machine.half(Load(concurrency=3), range(7))
    assert machine.busiest == 3
    assert machine.started() == {0: 0.0, 1: 0.0, 2: 0.0, 3: 3.0, 4: 5.0, 5: 6.0, 6: 7.0}
    assert half.seconds == 25.0
    assert half.numbers == [1, 3, 2, 5, 6, 0, 4]
    assert half.tokens == 7 * 4
    assert half.waited == 43.0
    assert half.counted == ServerCounters("vLLM", 28, 0)


@pytest.mark.parametrize(("at_a_time", "seconds"), [(1, 80.0), (4, 20.0), (8, 10.0)])
def test_a_block_lasts_as_its_load_has_it(machine: Machine, at_a_time: int, seconds: float) -> None:
    assert machine.half(Load(concurrency=at_a_time), range(8)).seconds == seconds
    assert machine.busiest == at_a_time


def test_requests_of_a_rate_come_when_they_are_due_whatever_is_under_way(machine: Machine) -> None:
    """2 a second, answers of 10 s: gaps are exponential draws, added up, the first request at once."""
    half = machine.half(Load(rate=2.0), range(16), seed=11)
    gaps = np.random.default_rng(11).exponential(0.5, 16)
    due = np.concatenate([[0.0], np.cumsum(gaps[1:])])
    assert list(machine.started().values()) == pytest.approx(due.tolist())
    assert half.seconds == pytest.approx(due[-1] + 10.0)
    assert 4.0 < due[-1] < 14.0, "16 requests at 2 a second"
    before, machine.log = machine.started(), []
    machine.half(Load(rate=2.0), range(16), seed=12)
    assert list(machine.started().values())[1:] != list(before.values())[1:], "another block, other gaps"


def test_the_mean_gap_is_that_of_the_rate(machine: Machine) -> None:
    machine.half(Load(rate=40.0), range(2000))
    starts = list(machine.started().values())
    assert (starts[-1] - starts[0]) / 1999 == pytest.approx(1 / 40, rel=0.05)


def test_what_is_refused_is_told_and_counts_nowhere(machine: Machine) -> None:
    machine.refused = {1, 2}
    half = machine.half(Load(concurrency=1), range(4))
    assert (half.numbers, len(half.exchanges)) == ([0, 3], 2)
    assert half.refused == ["no room for 1", "no room for 2"]
    assert (half.tokens, half.waited, half.seconds) == (8, 20.0, 40.0)


def test_a_half_is_read_back_as_it_was(machine: Machine) -> None:
    machine.refused = {2}
    half = machine.half(Load(concurrency=2), range(5))
    assert Half.from_dict(json.loads(json.dumps(half.to_dict()))) == half
    bare = Half()
    assert Half.from_dict(json.loads(json.dumps(bare.to_dict()))) == bare


@pytest.mark.parametrize(
    ("load", "requests", "sizes"),
    [
        (Load(concurrency=1), None, [4] * 6),
        (Load(concurrency=1), 12, [2] * 6),
        (Load(concurrency=1), 3, [1] * 6),
        (Load(concurrency=8), 12, [8] * 6),  # a smaller block would not be eight at a time
        (Load(concurrency=2), 60, [8] * 8),
        (Load(rate=3.0), None, [16] * 6),
        (Load(rate=3.0), 30, [5] * 6),
    ],
)
def test_blocks_are_as_large_as_their_load_needs(load: Load, requests: int | None, sizes: list[int]) -> None:
    plans = plan(5, [load], [0.0], requests=requests)
    assert [len(each.requests) for each in plans] == sizes
    assert [each.at for each in plans] == list(range(len(sizes)))
    numbers = [each for one in plans for each in one.requests]
    assert [each.number for each in numbers] == list(range(sum(sizes))), "no request twice"
    assert [each.prompt for each in numbers] == [n % 5 for n in range(sum(sizes))]


def test_every_load_and_temperature_has_its_blocks_and_every_prompt_is_asked() -> None:
    loads = [Load(concurrency=1), Load(rate=2.0)]
    plans = plan(100, loads, [0.0, 1.0], requests=None)
    kinds = [(each.temperature, each.load) for each in plans]
    assert list(dict.fromkeys(kinds)) == [(0.0, loads[0]), (0.0, loads[1]), (1.0, loads[0]), (1.0, loads[1])]
    for kind in set(kinds):
        asked_for = {n.prompt for each, own in zip(plans, kinds, strict=True) if own == kind for n in each.requests}
        assert asked_for == set(range(100))


def measured(machine: Machine, out: Path, loads: list[Load], servers: Sequence[str], requests: int = 6) -> list[Block]:
    plans = plan(len(PROMPTS), loads, [0.0, 0.5], requests=requests)
    return measure_blocks(PROMPTS, plans, [asked(each) for each in servers], CONFIG, out)


def test_both_servers_are_asked_the_same_and_take_turns_in_being_first(machine: Machine, tmp_path: Path) -> None:
    """The first block of a load and temperature is behind a warm-up of as many requests as are under way."""
    servers = ("http://own/v1", "http://base/v1")
    loads = [Load(concurrency=1), Load(concurrency=2)]
    done = measured(machine, tmp_path, loads, ["http://own", "http://base"], 12)
    entries = iter(machine.log)

    def next_part(block: Block, url: str, size: int) -> None:
        some = [next(entries) for _ in range(size)]
        assert {(server, temperature) for server, _, _, _, temperature in some} == {(url, block.plan.temperature)}
        assert sorted(number for _, _, number, _, _ in some) == [each.number for each in block.plan.requests[:size]]

    for each in done:
        if each.plan.at == 0:
            for url in servers:
                next_part(each, url, each.plan.load.concurrency or 0)
        for url in servers if each.plan.at % 2 == 0 else servers[::-1]:
            next_part(each, url, len(each.plan.requests))
        assert each.baseline is not None
        assert sorted(each.own.numbers) == sorted(each.baseline.numbers) == [n.number for n in each.plan.requests]
        for url, half in zip(servers, (each.own, each.baseline), strict=True):
            assert all(done.text.startswith(f"{url} says") for done in half.exchanges)
    assert next(entries, None) is None
    assert len(done) == 2 * 2 * 6


def test_arrivals_are_the_same_at_both_servers_and_other_ones_in_every_block(machine: Machine, tmp_path: Path) -> None:
    plans = plan(len(PROMPTS), [Load(rate=2.0)], [0.0], requests=24)
    measure_blocks(PROMPTS, plans, [asked("http://own"), asked("http://base")], CONFIG, tmp_path)
    gaps: dict[str, list[list[float]]] = {"http://own/v1": [], "http://base/v1": []}
    warmed = machine.log[2 * 4 :]  # two servers, four requests
    for at in range(0, len(warmed), 4):
        times = [when for _, when, *_ in warmed[at : at + 4]]
        gaps[warmed[at][0]].append([round(later - now, 6) for now, later in pairwise(times)])
    own, base = gaps.values()
    assert own == base
    assert len({tuple(each) for each in own}) == len(own) == 6


def test_a_measurement_that_stopped_goes_on_behind_the_block_that_is_done(machine: Machine, tmp_path: Path) -> None:
    machine.refused = {3}
    with pytest.raises(EnvironmentFailure, match=r"answered none of 1 requests, the last one with: no room for 3\."):
        measured(machine, tmp_path, [Load(concurrency=1)], ["http://own"])
    machine.refused, machine.log = set(), []
    done = measured(machine, tmp_path, [Load(concurrency=1)], ["http://own"])
    assert [number for _, _, number, _, T in machine.log if T == 0.0] == [3, 3, 4, 5], "one of them warms up"
    assert [each.own.numbers for each in done] == [[n] for n in range(6)] * 2


@pytest.mark.parametrize("change", ["top_k", "top_p", "min_p", "max_new_tokens", "seed", "model", "url", "prompts"])
def test_what_changes_a_number_is_in_the_identity_of_what_is_kept(
    machine: Machine, tmp_path: Path, change: str
) -> None:
    plans = plan(len(PROMPTS), [Load(concurrency=1)], [0.0], requests=6)
    measure_blocks(PROMPTS, plans, [asked()], CONFIG, tmp_path)
    asked_before = len(machine.log)
    measure_blocks(PROMPTS, plans, [asked()], CONFIG, tmp_path)
    assert len(machine.log) == asked_before, "all of it is kept"
    other = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 13, "seed": 4, "prompts": "others.jsonl"}
    config = CONFIG.model_copy(update={change: other[change]}) if change in other else CONFIG
    server = asked("http://else") if change == "url" else asked()
    if change == "model":
        server = ServerRequest("http://own", "large", 0.0, 0, 1.0, 12, 7)
    with pytest.raises(RequestError):
        measure_blocks(PROMPTS, plans, [server], config, tmp_path)


@pytest.mark.parametrize("requests", [7, 12])
def test_other_blocks_are_another_measurement(machine: Machine, tmp_path: Path, requests: int) -> None:
    measure_blocks(PROMPTS, plan(5, [Load(concurrency=1)], [0.0], requests=6), [asked()], CONFIG, tmp_path)
    plans = plan(5, [Load(concurrency=1)], [0.0], requests=requests)
    with pytest.raises(RequestError):
        measure_blocks(PROMPTS, plans, [asked()], CONFIG, tmp_path)


def test_streams_of_requests_are_their_own() -> None:
    """Of one measurement and of its neighbours: no two requests, and no two seeds, draw the same numbers."""
    seeds = [
        ServerRequest("http://own", "small", 0.7, 0, 1.0, 12, seed).sampling(str(number))["seed"]
        for seed in range(20)
        for number in (*range(200), "probe")
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= each < 2**31 for each in seeds)
    again = ServerRequest("http://own", "small", 0.7, 0, 1.0, 12, 0).sampling("0")["seed"]
    assert again == seeds[0]
    assert "seed" not in ServerRequest("http://own", "small", 0.0, 0, 1.0, 12, 0).sampling("0")
