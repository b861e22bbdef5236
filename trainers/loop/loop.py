"""The one training loop, which every method uses.

`Loop.run` in order: rows of the step, the step itself, report, validation, probe, save. When each of
them is due is decided in the named helpers below it. Read next: `step.py`, forward, backward and
update; `objective.py`, what a method supplies; `snapshot.py`, what a resumed run needs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...drafters.layers.row_split import joined
from ...errors import Stopped, TrainingFailed
from ...storage import fault, replace_folder, restore_folder
from ..config import CheckpointConfig, LoopConfig, OptimizerConfig, ProbeConfig
from . import checkpoint, optimizer, state
from .compiled import compile_parts
from .feed import Feed, labels_in, upload
from .interruptions import StopFlag, name_the_silent, stop_on_signal
from .memory import explain_out_of_memory
from .objective import Batch, Objective
from .order import RowGroup, RowOrder, seed_of, share_of_group
from .progress import Meter, Record, Screen, copy_to_trackers
from .sharding import check_no_average, fit_buckets, gathered, is_sharded, standalone, uses_deepspeed
from .snapshot import Counters, Snapshots
from .step import Steps
from .sums import add_terms, means, total, totals

Probe = Callable[[nn.Module], dict[str, float]]
_log = logging.getLogger(__name__)


class TrainingRows(Protocol):
    """A data set for the loop."""

    def __len__(self) -> int: ...

    def batch(self, rows: list[int]) -> Batch: ...


@dataclass(frozen=True)
class Plan:
    """The recipe sections that the loop reads, and what its checkpoints say they are of."""

    loop: LoopConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    probe: ProbeConfig
    identity: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunOutcome:
    """How a finished run ended."""

    steps: int
    validation_loss: float
    """Mean over held-out rows; NaN when the run was finished before it was resumed."""
    best: dict[str, float] | None
    skipped: int = 0
    """Steps that were left out, as loss or gradient was not finite."""


class Loop:
    """Trains one objective on one set of rows, in one process or many."""

    def __init__(
        self,
        objective: Objective,
        train: TrainingRows,
        validation: TrainingRows,
        plan: Plan,
        accelerator: Accelerator,
        *,
        out: Path,
        export_to: Path,
        probe: Probe | None,
        by_validation: bool = False,
        probe_together: bool = False,
    ) -> None:
        """All that a run needs; nothing is trained yet.

        Args:
            train, validation: packed rows to learn from, and held-out ones.
            out: the run's folder, of checkpoints and metrics.
            export_to: the drafter's folder, which appears whole whenever the weights are the best so far.
            probe: decodes held-out prompts with the module that is trained; its tau chooses the best weights.
            by_validation: without a probe, export those of the lowest held-out loss, not the last ones.
            probe_together: every process probes, as all decode with the target together.
        """
        self.by_validation, self.probe_together = by_validation, probe_together
        self.objective, self.train_rows, self.validation_rows = objective, train, validation
        self.plan, self.accelerator, self.probe = plan, accelerator, probe
        self.out, self.export_to = out, export_to
        team = accelerator
        self.group = RowGroup.of(team.process_index, team.num_processes, plan.loop.context_parallel)
        if self.group.size > 1:
            objective.split_rows(joined(self.group.size, timedelta(seconds=plan.loop.stall_seconds)))
        self.compiled = compile_parts(objective.module, plan.loop)
        self.order = RowOrder(len(train), plan.loop.batch_rows, plan.loop.seed)
        self.best: dict[str, float] | None = None
        fused = optimizer.fuses(accelerator.device) and not uses_deepspeed(accelerator)
        optimizers = optimizer.build(objective.module, plan.optimizer, fused=fused)
        fit_buckets(accelerator, objective.module)
        self.module, *self.optimizers = accelerator.prepare(objective.module, *optimizers)
        decay = plan.loop.ema
        if is_sharded(objective.module):
            check_no_average(decay)
        self.average = None if decay is None else state.Average(objective.module, decay)
        self.rollouts = objective.rollouts
        self.snapshots = Snapshots(
            out / "checkpoints",
            accelerator,
            wrapped=self.module,
            module=objective.module,
            optimizers=self.optimizers,
            average=self.average,
            rollouts=self.rollouts,
            identity=plan.identity,
            rows=train,
            micro_rows=lambda: self.steps.micro_rows,
            compiled=plan.loop.compile,
        )
        self.feed = Feed(self.batches, objective, steps=plan.loop.steps)
        self.steps = Steps(
            objective,
            self.module,
            self.optimizers,
            accelerator,
            loop=plan.loop,
            optimizer=plan.optimizer,
            feed=self.feed,
            average=self.average,
        )
        objective.set_steps(plan.loop.steps)

    def run(self, resume: Path | None) -> RunOutcome:
        """Train from the start, or from a complete checkpoint, to the last step."""
        loop = self.plan.loop
        first = 0 if resume is None else self.load(resume)
        if resume is not None:
            self.export_anew(resume, first)
        main = self.accelerator.is_main_process
        record = Record(self.out / "metrics.jsonl", after=first, active=main)
        screen = Screen(loop.steps, first=first, active=main)
        meter = Meter()
        validation = float("nan")
        watch = name_the_silent(self.out, self.accelerator, bound=loop.stall_seconds)
        memory = explain_out_of_memory("outside of a step's gradients")
        with stop_on_signal() as stop, closing(record), closing(screen), closing(self.feed), watch, memory:
            for step in range(first, loop.steps):
                done, last = step + 1, step + 1 == loop.steps
                self.train_step(step, meter)
                screen.step()
                if done % loop.log_every == 0 or last:
                    self.report(done, meter, record, screen)
                if done % loop.validate_every == 0 or last:
                    validation = self.validate(done, record, screen)
                    if self.by_validation:
                        self.export_lowest(done, validation)
                    meter.restart()
                if self.is_due(done, self.plan.probe.every_steps):
                    self.probe_and_export(done, record, screen)
                    meter.restart()
                stopped = self.agreed(stop)
                if stopped or last or done % self.plan.checkpoint.every_steps == 0:
                    self.save(done)
                if stopped and not last:
                    raise Stopped(
                        f"{stop.name or 'a signal on another process'}: stopped after step {done} "
                        f"of {loop.steps} with a checkpoint; `--resume auto` continues from it"
                    )
        if first == loop.steps:
            _log.info("the run was finished already, after step %d", first)
        return RunOutcome(loop.steps, validation, self.best, self.steps.skipped)

    # ---- one step -------------------------------------------------------------------------

    def train_step(self, step: int, meter: Meter) -> None:
        """Forward, backward, check, update. A non-finite step leaves the weights as they are."""
        batches = self.feed.step(step)
        self.steps.seed(step)
        if self.rollouts is not None:
            batches = self.rewritten(step, batches, meter)
        labels = self.in_all(labels_in(batches))
        if labels == 0:
            raise TrainingFailed(f"step {step}: none of its {self.order.batch} rows has a label")
        sums = self.steps.take(step, batches, labels)
        tokens = self.order.batch * batches[0]["input_ids"].shape[1]
        meter.add(sums, labels, tokens, self.feed.take_waited())

    def batches(self, step: int) -> list[Batch]:
        """This process's micro-batches of a step, on its device."""
        shares = share_of_group(self.order.step(step), self.group, self.steps.micro_rows)
        return [upload(self.train_rows.batch(share), self.accelerator.device) for share in shares]

    def rewritten(self, step: int, batches: list[Batch], meter: Meter) -> list[Batch]:
        """The micro-batches with a share of their rows generated by the models."""
        assert self.rollouts is not None
        began = time.perf_counter()
        team = self.accelerator
        indices = range(team.process_index, self.order.batch, team.num_processes)
        seed = seed_of(f"{self.plan.loop.seed}/{step}/rollouts")
        rewritten = self.rollouts.rewrite(batches, indices, step, seed)
        meter.add_rollouts(time.perf_counter() - began)
        return rewritten

    # ---- policy ---------------------------------------------------------------------------

    def is_due(self, done: int, every: int | None) -> bool:
        return done == self.plan.loop.steps or (every is not None and done % every == 0)

    def report(self, done: int, meter: Meter, record: Record, screen: Screen) -> None:
        if self.compiled is not None:
            self.compiled.tell()
        self.steps.settle(done)
        lr = optimizer.rate(done - 1, self.plan.loop.steps, self.plan.optimizer)
        values = {**meter.means(self.accelerator), "lr": lr, "epoch": self.order.epoch(done), **meter.clock()}
        if self.steps.skipped:
            values["skipped_steps"] = self.steps.skipped
        record.write("train", done, values)
        screen.report(done, values)
        copy_to_trackers(self.accelerator, values, done)
        meter.restart()

    def validate(self, done: int, record: Record, screen: Screen) -> float:
        """Mean terms over held-out rows, a share of them on each process, or on the processes that share rows."""
        held_out = self.validation_rows
        # a seeded choice: packing puts the longest documents first, so the first rows are no fair sample
        count = min(self.plan.loop.validate_rows, len(held_out))
        chosen = RowOrder(len(held_out), count, self.plan.loop.seed).step(0)
        first, groups, _ = self.group
        sums: dict[str, Tensor] = {}
        labels = 0
        with self.averaged(), torch.no_grad(), _eval_mode(self.module):
            # ZeRO-3 gathers weights in forward passes, so every process must make equally many
            for at in range(first, groups * math.ceil(count / groups), groups):
                row = held_out.batch([chosen[at % count]])
                row["loss_mask"] = row["loss_mask"] & (at < count)
                batch = upload(row, self.accelerator.device)
                with self.accelerator.autocast():
                    _, terms = self.objective.module(batch, self.objective.prepare(batch))
                labels += labels_in([batch])
                add_terms(sums, terms)
        found = means(totals(self.accelerator, sums), self.in_all(labels))
        values = {f"validation_{name}": value for name, value in found.items()}
        record.write("validation", done, values)
        screen.report(done, values)
        copy_to_trackers(self.accelerator, values, done)
        screen.warn_of_no_loss(done, values, count)
        return values.get("validation_loss", float("nan"))

    def probe_and_export(self, done: int, record: Record, screen: Screen) -> None:
        """Decode held-out prompts, and export when no tau so far is better; without a probe, at the end."""
        draft = self.objective.draft()
        if self.probe is None or draft is None:
            if done == self.plan.loop.steps and not self.by_validation:
                self.export()
            return
        with self.averaged(), _eval_mode(draft), gathered(draft):
            probes = self.accelerator.is_main_process or self.probe_together
            values = self.probe(standalone(draft)) if probes else {}
        if values:
            record.write("probe", done, values)
            screen.report(done, {f"probe_{name}": value for name, value in values.items()})
        better = total(self.accelerator, float(bool(values) and self.beats_best(values)))
        if better:
            self.best = {**values, "step": float(done)}
            self.export()
        self.accelerator.wait_for_everyone()

    def export_lowest(self, done: int, loss: float) -> None:
        """Export where the held-out loss, the same on every process, is the lowest so far; without one, at the end."""
        last = done == self.plan.loop.steps
        lowest = math.inf if self.best is None else self.best["validation_loss"]
        if loss < lowest or (last and self.best is None):
            self.best = None if math.isnan(loss) else {"validation_loss": loss, "step": float(done)}
            self.export()
            self.accelerator.wait_for_everyone()

    def beats_best(self, values: dict[str, float]) -> bool:
        # of equal ones the later: it has learnt longer
        return self.best is None or values["tau"] >= self.best["tau"]

    def export(self) -> None:
        with self.averaged(), gathered(self.objective.module):
            if self.accelerator.is_main_process:
                replace_folder(self.export_to, self.objective.export)

    # ---- saving and resuming --------------------------------------------------------------

    def save(self, done: int) -> None:
        self.steps.settle(done)
        counters = Counters(done, self.best, self.steps.skipped, self.steps.bad_steps)
        self.snapshots.save(counters, keep=self.plan.checkpoint.keep)

    def load(self, saved: Path) -> int:
        """Restore the state after the checkpoint's step, and return that step."""
        counters = self.snapshots.load(saved)
        goes_on = counters.step < self.plan.loop.steps
        self.best = self.snapshots.best_of(counters, saved) if goes_on else counters.best
        self.steps.skipped, self.steps.bad_steps = counters.skipped, counters.bad_steps
        epochs = self.order.epoch(counters.step)
        _log.info("resumed %s: step %d, %.2f epochs seen", saved, counters.step, epochs)
        return counters.step

    def export_anew(self, saved: Path, first: int) -> None:
        """Export the best weights so far if this folder lacks the export of the checkpoint's run.

        Without the checkpoint that has them, the next probe chooses the best anew.
        """
        if self.has_export(saved) or (self.best is None and first < self.plan.loop.steps):
            return
        if self.best is None:
            _log.info("%s is missing: exported from %s", self.export_to, saved)
            self.export()
            return
        step = int(self.best["step"])
        source = saved.with_name(checkpoint.name_of(step))
        if fault(source) is None:
            self.snapshots.load(source)
            self.export()
            self.snapshots.load(saved)
            _log.info("%s: the best draft so far, exported from %s", self.export_to, source)
            return
        self.best = None
        _log.warning(
            "the best draft so far, of step %d, is not in %s, and its checkpoint is gone: %s",
            step,
            self.export_to,
            "the next probe chooses anew"
            if first < self.plan.loop.steps
            else f"what was trained up to step {first} is exported",
        )
        if first == self.plan.loop.steps:
            self.export()

    def has_export(self, saved: Path) -> bool:
        """Whether the export in this folder is of the run whose checkpoint `saved` is."""
        if not self.accelerator.is_main_process:
            return total(self.accelerator, 0.0) > 0
        restore_folder(self.export_to)
        own = saved.resolve().parent == (self.out / "checkpoints").resolve()
        return total(self.accelerator, float(own and self.export_to.is_dir())) > 0

    # ---- small parts ----------------------------------------------------------------------

    def averaged(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the module has the moving average of its weights, where one is kept."""
        if self.average is None:
            return contextlib.nullcontext()
        return self.average.in_place(self.objective.module)

    def agreed(self, stop: StopFlag) -> bool:
        """Whether any process was asked to stop, so that all stop after the same step."""
        return total(self.accelerator, float(bool(stop))) > 0

    def in_all(self, labels: float) -> float:
        """Labels over all processes, each once: those that share a row have counted it alike."""
        return total(self.accelerator, labels) / self.group.size


@contextlib.contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    was = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was)
