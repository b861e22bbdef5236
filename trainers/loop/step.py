"""One optimiser step: forward and backward of each micro-batch, check, update.

On a device whose queue the host runs ahead of, nothing here reads it: whether a step is finite is decided there, the
optimiser leaves such a step out by itself, and what was left out is read with the next report (`optimizer.py`). On a
CPU reading is free, and is done at once.

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

from ...decoding.on_host import rows_of
from ...errors import TrainingFailed
from ..config import LoopConfig, OptimizerConfig
from . import optimizer
from .feed import Feed
from .memory import free_memory, is_out_of_memory, out_of_memory
from .objective import Batch, Objective
from .optimizer import Unread, leaves_out_by_itself
from .order import seed_of
from .sharding import has_stepped, uses_deepspeed, visible_to_deepspeed
from .state import Average
from .sums import add_terms, all_finite

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
        by_itself = not uses_deepspeed(accelerator) and accelerator.scaler is None
        self.unread = Unread() if by_itself and leaves_out_by_itself(optimizers, accelerator.device) else None
        """Of steps whose outcome the host has not read; None where it reads each at once."""

    def take(self, step: int, batches: list[Batch], labels: float) -> dict[str, Tensor]:
        """Train on this process's micro-batches; returns the sums of all terms in this process, where they were made.

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
        self.update(step, sums)
        return sums

    def seed(self, step: int) -> None:
        """Every step has its own seed, so there is no random state to save."""
        key = f"{self.loop.seed}/{step}"
        torch.manual_seed(seed_of(f"{key}/{self.accelerator.process_index}"))
        self.objective.begin_step(step, seed_of(key))

    def set_rate(self, step: int) -> None:
        lr = optimizer.rate(step, self.loop.steps, self.optimizer)
        for each in self.optimizers:
            for group in each.param_groups:
                group["lr"] = optimizer.group_rate(group, step, lr, self.optimizer)

    # ---- gradients ------------------------------------------------------------------------

    def tried(self, step: int, batches: list[Batch], labels: float) -> dict[str, Tensor] | None:
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

    def accumulated(self, step: int, batches: list[Batch], labels: float) -> dict[str, Tensor]:
        """Forward and backward of every micro-batch; the sums of all terms in this process, float64."""
        sums: dict[str, Tensor] = {}
        for number, batch in enumerate(batches):
            teacher_output = self.objective.prepare(batch)
            self.feed.look_ahead(step, batches, number)
            with self.last_synchronises(number, len(batches)):
                terms = self.backward(batch, teacher_output, labels, len(batches))
            add_terms(sums, terms)
        self.feed.make_next(step)  # before the update, where a device that is read is waited for
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

    def update(self, step: int, sums: dict[str, Tensor]) -> None:
        """Clip and step; skip the step where something is not finite, and stop after too many such.

        Args:
            sums: of all terms, in this process.
        """
        is_finite = all_finite(self.accelerator, sums)
        if not uses_deepspeed(self.accelerator):
            norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.optimizer.clip)
            is_finite = is_finite & torch.isfinite(torch.as_tensor(norm, device=is_finite.device))
        if self.unread is None:
            self.update_at_once(step, sums, is_finite)
        else:
            self.update_unread(is_finite, self.unread)

    def update_at_once(self, step: int, sums: dict[str, Tensor], is_finite: Tensor) -> None:
        """Step or not, by what the host reads."""
        # DeepSpeed has stepped already, inside of the backward pass
        finite = has_stepped(self.wrapped) if uses_deepspeed(self.accelerator) else bool(is_finite)
        self.count(step, finite=finite, found="" if finite else _not_finite(sums))
        if finite and not uses_deepspeed(self.accelerator):
            for each in self.optimizers:
                each.step()
        elif self.accelerator.scaler is not None:
            self.accelerator.scaler.update()  # lowers fp16's gradient scale, as a step would have done
        self.zero_grad()
        if finite and self.average is not None:
            self.average.update(self.objective.module)

    def update_unread(self, is_finite: Tensor, unread: Unread) -> None:
        """Step or not, by what the device knows alone."""
        unread.note(is_finite)
        for each in self.optimizers:
            each.optimizer.found_inf = (~is_finite).float()  # torch's name for: leave this step out
            each.step()
        self.zero_grad()
        if self.average is not None:
            self.average.update(self.objective.module, where=is_finite)

    def settle(self, done: int) -> None:
        """Read which steps were left out up to step `done`, and count them.

        Raises:
            TrainingFailed: too many in a row.
        """
        found = None if self.unread is None else self.unread.read(self.bad_steps)
        if found is None:
            return
        self.skipped, self.bad_steps = self.skipped + found.left_out, found.row
        if found.longest_row > self.loop.max_bad_steps:
            raise self.too_many(f"up to step {done}", found.longest_row)
        if found.left_out:
            _log.warning("%d steps up to step %d skipped: loss or gradient is not finite", found.left_out, done)

    def count(self, step: int, *, finite: bool, found: str = "") -> None:
        """Count a step that is skipped, in which `found`; TrainingFailed where too many are in a row."""
        self.bad_steps = 0 if finite else self.bad_steps + 1
        if self.bad_steps > self.loop.max_bad_steps:
            raise self.too_many(f"step {step}", self.bad_steps, found)
        if not finite:
            self.skipped += 1
            _log.warning("step %d skipped: loss or gradient is not finite%s", step, f" ({found})" if found else "")

    def too_many(self, when: str, row: int, found: str = "") -> TrainingFailed:
        return TrainingFailed(
            f"{when}: {row} non-finite steps in a row{f', in the last {found}' if found else ''} (limit "
            f"loop.max_bad_steps = {self.loop.max_bad_steps}). The weights are those before "
            "the first of them; lower optimizer.lr or set loop.precision to fp32"
        )

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()


def _not_finite(sums: dict[str, Tensor]) -> str:
    """What is not finite of a step, as this process sees it."""
    values = {name: float(each) for name, each in sums.items()}
    found = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    return " and ".join(found) or "the gradient is not"


def cut(batch: Batch, rows: int) -> Iterator[Batch]:
    """A micro-batch in parts of at most so many rows; one that is small enough is handed on as it is."""
    count = len(batch["input_ids"])
    if count <= rows:
        yield batch
        return
    for at in range(0, count, rows):
        yield {name: rows_of(tensor, slice(at, at + rows)) for name, tensor in batch.items()}
