"""Text that is easily learnt, a target that has learnt it, and runs of the real loop on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from conftest import VOCABULARY
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.trainers.config import CheckpointConfig, LoopConfig, ModelConfig, OptimizerConfig, ProbeConfig
from draftsmith.trainers.loop import setup
from draftsmith.trainers.loop.loop import Loop, Plan
from draftsmith.trainers.student.architecture import fresh_model
from draftsmith.trainers.target import NextToken
from torch import Tensor

Batch = dict[str, Tensor]


class Chains:
    """Rows in which a token determines the next one with probability `kept`, else it is random.

    With `uneven`, rows have unlike numbers of labels, and so have micro-batches of few rows.
    """

    def __init__(self, rows: int, seed: int, length: int = 24, kept: float = 0.95, *, uneven: bool = False) -> None:
        self.uneven = uneven
        g = torch.Generator().manual_seed(seed)
        follows = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(7))
        self.ids = torch.randint(0, VOCABULARY, (rows, length), generator=g)
        regular = torch.rand(rows, length, generator=g) < kept
        for t in range(1, length):
            self.ids[:, t] = torch.where(regular[:, t], follows[self.ids[:, t - 1]], self.ids[:, t])

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: list[int] | None = None) -> Batch:
        chosen = range(len(self)) if rows is None else rows
        ids = self.ids[list(chosen)]
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        counts = positions > 0
        if self.uneven:
            counts = counts & labelled_beginning(chosen, ids.shape[1])
        return {"input_ids": ids, "loss_mask": counts, "positions": positions, "documents": torch.zeros_like(ids)}


def labelled_beginning(rows: Iterable[int], length: int) -> Tensor:
    """bool [R, S]: of each row a beginning of its own length, 4 tokens to the whole row."""
    return torch.arange(length) < torch.tensor([[4 + (7 * row) % (length - 3)] for row in rows])


def learnt(rows: Chains, steps: int = 60) -> Backbone:
    """A small target that has learnt the rows for some steps, with no gradient left behind."""
    torch.manual_seed(0)
    sizes = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=1, head_size=16, max_positions=128)
    model = fresh_model(sizes, vocabulary=VOCABULARY, eos=None)
    descend(NextToken(model, chunk=512), lambda _batch: None, rows.batch(), steps=steps, lr=2e-2)
    model.zero_grad()
    return Backbone(model.eval(), name="small")


def descend(
    module: torch.nn.Module, teacher_output_of: Callable[[Batch], Any], batch: Batch, *, steps: int, lr: float
) -> None:
    """Some steps on one batch, without what a run writes."""
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=lr)
    labels = batch["loss_mask"].sum()
    for _ in range(steps):
        loss, _ = module(batch, teacher_output_of(batch))
        optimizer.zero_grad()
        (loss / labels).backward()
        optimizer.step()


def loop_on(
    out: Path,
    make: Callable[[], Any],
    rows: Callable[[int, int], Any],
    *,
    steps: int,
    lr: float,
    micro: int = 4,
    validate_every: int | None = None,
) -> tuple[Any, Loop]:
    """The objective that `make` builds and the real loop over `rows(count, seed)`."""
    plan = Plan(
        LoopConfig(
            steps=steps,
            batch_rows=8,
            micro_rows=micro,
            precision="fp32",
            validate_every=validate_every or steps,
            validate_rows=4,
            log_every=2,
        ),
        OptimizerConfig(lr=lr, warmup_steps=2),
        CheckpointConfig(every_steps=3),
        ProbeConfig(),
    )
    out.mkdir(parents=True, exist_ok=True)
    setup.make_deterministic(plan.loop)
    accelerator = setup.make_accelerator(plan.loop, plan.optimizer, out)
    goal = make()
    loop = Loop(goal, rows(40, 1), rows(8, 2), plan, accelerator, out=out, export_to=out / "drafter", probe=None)
    return goal, loop


def stop_behind(
    loop: Loop, step: int | None, watch: Callable[[int], None] | None = None, sent: signal.Signals = signal.SIGTERM
) -> None:
    """Send the signal of an operator behind a step; `watch` is called behind every one."""
    real = loop.train_step

    def step_then_signal(number: int, *rest: Any) -> None:
        real(number, *rest)
        if watch is not None:
            watch(number)
        if number + 1 == step:
            os.kill(os.getpid(), sent)

    loop.train_step = step_then_signal  # type: ignore[method-assign]
