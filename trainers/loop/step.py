"""One optimiser step: forward and backward of each micro-batch, check, update.

A step that runs out of memory is taken again in micro-batches of half the rows, as are all behind it:
the batch, and with it the mathematics, stays. Read next: `loop.py`, which takes the steps;
`sharding.py`, for what DeepSpeed does by itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ...errors import TrainingFailed
from ..config import LoopConfig, OptimizerConfig
from . import optimizer
from .feed import Feed
from .memory import free_memory, is_out_of_memory, out_of_memory
from .objective import Batch, Objective, Stepwise
from .order import seed_of
from .sharding import has_stepped, uses_deepspeed, visible_to_deepspeed
from .state import Average
from .sums import totals

_log = logging.getLogger(__name__)


class Steps:
    """Takes the steps of a run, and counts those that it skipped."""

    def __init__(
        self,
        objective: Objective,
        wrapped: Any,
        optimizers: Sequence[Any],
        accelerator: Accelerator,
        *,
        loop: LoopConfig,
        optimizer: OptimizerConfig,
        feed: Feed,
        average: Average | None,
    ) -> None:
        """`wrapped` and `optimizers`: as accelerate's `prepare` returns them for the objective's module."""
        self.objective, self.wrapped, self.optimizers = objective, wrapped, optimizers
        self.accelerator, self.loop, self.optimizer = accelerator, loop, optimizer
        self.feed, self.average = feed, average
        self.micro_rows = loop.micro_rows
        """Most rows of a forward pass; fewer than the recipe's once memory has run out."""
        self.skipped = self.bad_steps = 0

    def take(self, step: int, batches: list[Batch], labels: float) -> dict[str, float]:
        """Train on this process's micro-batches; returns the sums of all terms over all processes.

        Args:
            labels: in the whole batch, over all processes.

        Raises:
            TrainingFailed: too many non-finite steps in a row. EnvironmentFailure: memory ran out, and
                the micro-batches cannot be made smaller.
        """
        self.set_rate(step)  # before the backward pass, in which DeepSpeed updates the weights
        sums = None
        while sums is None:
            sums = self.tried(step, batches, labels)
        sums = totals(self.accelerator, sums)
        self.update(step, finite=all(map(math.isfinite, sums.values())))
        return sums

    def seed(self, step: int) -> None:
        """Every step has its own seed, so there is no random state to save."""
        key = f"{self.loop.seed}/{step}"
        torch.manual_seed(seed_of(f"{key}/{self.accelerator.process_index}"))
        if isinstance(self.objective, Stepwise):
            self.objective.begin_step(step, seed_of(key))

    def set_rate(self, step: int) -> None:
        lr = optimizer.rate(step, self.loop.steps, self.optimizer)
        for each in self.optimizers:
            for group in each.param_groups:
                group["lr"] = optimizer.group_rate(group, step, lr, self.optimizer)

    # ---- gradients ------------------------------------------------------------------------

    def tried(self, step: int, batches: list[Batch], labels: float) -> dict[str, float] | None:
        """Gradients and sums of a step; None where memory ran out and smaller micro-batches are next."""
        parts = [part for batch in batches for part in cut(batch, self.micro_rows)]
        try:
            return self.accumulated(step, parts, labels)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.check_divisible(step, error)
        # behind the handler: its error holds the tensors of the step
        self.start_again(step)
        return None

    def accumulated(self, step: int, batches: list[Batch], labels: float) -> dict[str, float]:
        """Forward and backward of every micro-batch; the sums of all terms in this process."""
        sums: dict[str, float] = {}
        for number, batch in enumerate(batches):
            teacher_output = self.objective.prepare(batch)
            self.feed.look_ahead(step, batches, number)
            with self.last_synchronises(number, len(batches)):
                terms = self.backward(batch, teacher_output, labels, len(batches))
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def backward(self, batch: Batch, teacher_output: Any, labels: float, count: int) -> dict[str, Tensor]:
        """Add the gradient of this micro-batch's share of the mean loss over all labels."""
        loss, terms = self.wrapped(batch, teacher_output)
        # data parallelism averages gradients over processes; the loss is a sum over them
        scale = self.accelerator.num_processes / labels
        if uses_deepspeed(self.accelerator):
            scale *= count  # DeepSpeed divides by the accumulation steps itself
            loss = visible_to_deepspeed(loss, terms)
        self.accelerator.backward(loss * scale)
        return terms

    def last_synchronises(self, number: int, count: int) -> contextlib.AbstractContextManager[Any]:
        """A context in which gradients are added up over processes for the last micro-batch alone."""
        last = number == count - 1
        if uses_deepspeed(self.accelerator):
            self.accelerator.sync_gradients = last  # else it steps after every micro-batch
        if last or uses_deepspeed(self.accelerator):
            return contextlib.nullcontext()
        return self.accelerator.no_sync(self.wrapped)

    def check_divisible(self, step: int, error: BaseException) -> None:
        """Raise EnvironmentFailure where a step cannot be taken again in smaller parts."""
        # other processes are in the middle of adding up gradients with this one
        alone = self.accelerator.num_processes == 1 and not uses_deepspeed(self.accelerator)
        if self.micro_rows == 1 or not alone:
            rows = f"{self.micro_rows} row{'s' * (self.micro_rows > 1)} of a forward pass"
            raise out_of_memory(f"in step {step} with {rows}", error) from error

    def start_again(self, step: int) -> None:
        """Forget the gradients of a step that ran out of memory, and halve the micro-batches."""
        self.zero_grad()
        self.feed.forget()
        free_memory()
        self.micro_rows = (self.micro_rows + 1) // 2
        _log.warning(
            "step %d ran out of memory; it is taken again with %d rows of a forward pass, and so are the next: "
            "the batch stays what it is (to begin so: --loop.micro_rows %d)",
            step,
            self.micro_rows,
            self.micro_rows,
        )
        self.seed(step)

    # ---- update ---------------------------------------------------------------------------

    def update(self, step: int, *, finite: bool) -> None:
        """Clip and step; skip the step where something is not finite, and stop after too many such."""
        if uses_deepspeed(self.accelerator):
            finite = has_stepped(self.wrapped)  # inside of the backward pass
        else:
            norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.optimizer.clip)
            finite = finite and bool(torch.isfinite(torch.as_tensor(norm)))
        self.count(step, finite=finite)
        if finite and not uses_deepspeed(self.accelerator):
            for each in self.optimizers:
                each.step()
        elif self.accelerator.scaler is not None:
            self.accelerator.scaler.update()  # lowers fp16's gradient scale, as a step would have done
        self.zero_grad()
        if finite and self.average is not None:
            self.average.update(self.objective.module)

    def count(self, step: int, *, finite: bool) -> None:
        """Count a step that is skipped; TrainingFailed where too many are in a row."""
        self.bad_steps = 0 if finite else self.bad_steps + 1
        if self.bad_steps > self.loop.max_bad_steps:
            raise TrainingFailed(
                f"step {step}: {self.bad_steps} non-finite steps in a row (limit "
                f"loop.max_bad_steps = {self.loop.max_bad_steps}). The weights are those before "
                "the first of them; lower optimizer.lr or set loop.precision to fp32"
            )
        if not finite:
            self.skipped += 1
            _log.warning("step %d skipped: loss or gradient is not finite", step)

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()


def cut(batch: Batch, rows: int) -> Iterator[Batch]:
    """A micro-batch in parts of at most so many rows; one that is small enough is handed on as it is."""
    count = len(batch["input_ids"])
    if count <= rows:
        yield batch
        return
    for at in range(0, count, rows):
        yield {name: tensor[at : at + rows] for name, tensor in batch.items()}
