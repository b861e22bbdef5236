"""Processes that share rows, or threads in their place: what each finds beside one that has whole rows."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from conftest import make_target
from draftsmith.drafters.eagle.net import PairNet
from draftsmith.drafters.layers import row_split
from draftsmith.errors import Stopped
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.method_config import Eagle3Config, EagleConfig, MtpConfig
from faults import toy
from helpers.models.method_objectives import build
from torch import Tensor

LABELS = "labels in the first part alone"
WORDS = [word for word in range(61) if word % 3 != 1]
HASS = {"passes": 3, "feature": 0.7, "ce": 0.4, "top_k": 0.3, "top_k_tokens": 5, "noise": 0.0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle": ("eagle", {"feature": 0.7, "ce": 0.4, "noise": 0.0}, {}),
    "hass": ("eagle", HASS, {}),
    "hass, computed again": ("eagle", HASS | {"recompute": True}, {}),
    "eagle3": ("eagle3", {"passes": 4, "layers": (0, 1, 2)}, {"tv": 0.3}),
    "eagle3, d-pace": ("eagle3", {"passes": 3, "layers": (0, 1, 2), "recompute": True}, {"positions": "d-pace"}),
    "mtp": ("mtp", {"passes": 3}, {"kl": 0.5, "ce": 0.5}),
    "mtp, before the norm": ("mtp", {"passes": 3, "state": "before", "recompute": True}, {"positions": "d-pace"}),
}
# documents of two rows; what is left of a row is padding
ROWS: dict[str, list[list[int]]] = {
    "packed": [[5, 1, 4], [2, 6]],
    "an odd length": [[3, 10], [1, 2, 8]],
    "one document": [[17], [17]],
    LABELS: [[16], [9, 7]],
}


Learnt = tuple[dict[str, Tensor], dict[str, Tensor]]


def goal_of(name: str) -> Any:
    method, settings, objective = CASES[name]
    target = make_target("qwen3")
    with torch.no_grad():
        target.model.model.norm.weight.mul_(3)
    torch.manual_seed(0)
    given = {"eagle": EagleConfig, "eagle3": Eagle3Config, "mtp": MtpConfig}[method](**settings)
    ids = WORDS if method == "eagle3" else None
    return build(method, target.model, ids=ids, objective=ObjectiveConfig(chunk=5, **objective), **{method: given})


def rows_of(name: str) -> dict[str, Tensor]:
    lengths = ROWS[name]
    S = max(map(sum, lengths))
    g = torch.Generator().manual_seed(2)
    documents, positions = torch.full((2, S), -1), torch.zeros(2, S, dtype=torch.long)
    for row, each in enumerate(lengths):
        numbers = [n for n, length in enumerate(each) for _ in range(length)]
        documents[row, : len(numbers)] = torch.tensor(numbers)
        positions[row, : len(numbers)] = torch.cat([torch.arange(length) for length in each])
    mask = (torch.rand(2, S, generator=g) < 0.8) & (positions > 0) & (documents >= 0)
    if name == LABELS:
        mask[:, 6:] = False
    ids = torch.randint(0, 61, (2, S), generator=g)
    return {"input_ids": ids, "loss_mask": mask, "positions": positions, "documents": documents}


def learnt(goal: Any, batch: dict[str, Tensor]) -> Learnt:
    """Loss and terms, and every gradient."""
    goal.module.zero_grad()
    loss, terms = goal.module(batch, goal.prepare(batch))
    loss.backward()
    found = {name: each.detach().double() for name, each in ({"": loss} | terms).items()}
    return found, {name: p.grad.double() for name, p in goal.module.named_parameters()}


def far(goal: Any, rows: str, whole: Learnt, split: row_split.RowSplit) -> dict[str, float]:
    """How far loss, terms and gradients of parts are from those of whole rows, relatively."""
    wanted, gradients = whole
    goal.split_rows(split)
    found, own = learnt(goal, rows_of(rows))
    sums = [found.get(term, torch.zeros((), dtype=torch.double)) for term in wanted]
    for each in (*sums, *own.values()):
        dist.all_reduce(each, group=split.group)
    terms = [float((mine - each).abs() / each.abs()) for mine, each in zip(sums, wanted.values(), strict=True)]
    parts = [float((own[at] - each).norm() / each.norm()) for at, each in gradients.items()]
    assert all(each.norm() > 0 for each in gradients.values())
    return {"loss": terms[0], "terms": max(terms), "gradients": max(parts)}


@contextlib.contextmanager
def no_halo() -> Iterator[None]:
    """Later passes read embeddings of the own part alone."""
    plain = PairNet.unroll

    def unroll(net: PairNet, hidden: Tensor, embeds: Tensor, *given: Any, **more: Any) -> list[Tensor]:
        return plain(net, hidden, embeds[:, : hidden.shape[1]], *given, **more)

    with mock.patch.object(PairNet, "unroll", unroll):
        yield


def no_gradient() -> Any:
    """Keys of other parts are read, and never learnt of."""
    plain = row_split.RowSplit.gathered
    return mock.patch.object(row_split.RowSplit, "gathered", lambda *given: plain(*given).detach())


def own_gradient() -> Any:
    """A process keeps what it alone makes of its part."""
    backward: Callable[..., Any] = lambda ctx, grad: (grad[:, :, ctx.split.own(ctx.length)], None, None)  # noqa: E731
    return mock.patch.object(row_split._Gathered, "backward", staticmethod(backward))


BUGS: dict[str, Callable[[], Any]] = {f.__name__: f for f in (no_halo, no_gradient, own_gradient)}


class Threads:
    """A group of threads in the place of processes: a fast test has no time to start those."""

    def __init__(self, world: int) -> None:
        self.world, self.own = world, threading.local()
        self._barrier, self._given = threading.Barrier(world, timeout=60), [torch.zeros(())] * world

    def all_gather(self, pieces: list[Tensor], x: Tensor, group: Threads) -> None:
        assert group is self
        self._given[self.own.rank] = x.detach().clone()
        self._barrier.wait()
        for piece, each in zip(pieces, self._given, strict=True):
            piece.copy_(each)
        self._barrier.wait()

    def all_reduce(self, x: Tensor, group: Threads) -> None:
        pieces = [torch.empty_like(x) for _ in range(self.world)]
        self.all_gather(pieces, x, group)
        x.copy_(torch.stack(pieces).sum(0))

    def far(self, goals: Sequence[Any], rows: str, whole: Learnt) -> list[dict[str, float]]:
        """`far` in each thread, with a goal of its own."""

        def one(rank: int) -> Any:
            self.own.rank = rank
            try:
                return far(goals[rank], rows, whole, row_split.RowSplit(rank, self.world, self))
            except BaseException:
                self._barrier.abort()  # or the others would wait for it
                raise

        collectives = {"all_gather": self.all_gather, "all_reduce": self.all_reduce}
        with mock.patch.multiple(dist, **collectives), ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(one, range(self.world)))


def compare(out: Path, parts: int) -> None:
    """Every case on every kind of rows, and with planted bugs; each process writes it down."""
    team = Accelerator(cpu=True)
    split = row_split.joined(parts, timedelta(seconds=60))
    said: dict[str, Any] = {"cases": {}, "bugs": {}}
    for name in CASES:
        whole, goal = goal_of(name), goal_of(name)
        for rows in ROWS:
            said["cases"][f"{name}, {rows}"] = far(goal, rows, learnt(whole, rows_of(rows)), split)
    whole, goal = goal_of("eagle3"), goal_of("eagle3")
    wanted = learnt(whole, rows_of("one document"))
    for bug, planted in BUGS.items():
        with planted():
            said["bugs"][bug] = far(goal, "one document", wanted, split)
    (out / f"said-{team.process_index}.json").write_text(json.dumps(said))


def train(out: Path, parts: int, stop_at: int | None = None) -> None:
    """The real loop, whose rows several processes share; which rows each was given is in `out/rows-RANK`."""
    loop = toy.loop_in(out, "eagle3", micro_rows=2, context_parallel=parts)
    with contextlib.suppress(Stopped):
        toy.run(loop, stop_at=stop_at)
    (out / f"rows-{loop.accelerator.process_index}").write_text(json.dumps(loop.train_rows.asked))


def refuse(out: Path) -> None:
    """A method without parts."""
    toy.loop_in(out, "medusa", context_parallel=2)
