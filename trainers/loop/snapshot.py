"""A run's checkpoints: everything that a resumed run needs, written to disk and read back.

Trained weights, moments, the moving average, rows that the models generated, and counters. With
DeepSpeed the first two are its own files, under our manifest. `checkpoint.py` publishes a folder of
files as a whole or not at all; `state.py` turns each part into tensors. Read next: `loop.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import load_file
from torch import Tensor, nn, optim

from ...errors import RequestError
from ...storage import publish, staging_of
from . import checkpoint, state
from .objective import Batch, RowWriter
from .sharding import uses_deepspeed


@dataclass(frozen=True)
class Counters:
    """A run's counters after the step that is saved."""

    step: int
    best: dict[str, float] | None
    skipped: int
    bad_steps: int


class Snapshots:
    """The checkpoints of one run: all of its processes save and load together."""

    def __init__(
        self,
        folder: Path,
        accelerator: Accelerator,
        *,
        wrapped: Any,
        module: nn.Module,
        optimizers: Sequence[Any],
        average: state.Average | None,
        rollouts: RowWriter | None,
    ) -> None:
        """`wrapped` and `optimizers`: as accelerate's `prepare` returns them for `module`."""
        self.folder, self.accelerator = folder, accelerator
        self.wrapped, self.module = wrapped, module
        self.optimizers = [_unwrapped(each) for each in optimizers]
        self.average, self.rollouts = average, rollouts

    def save(self, counters: Counters, *, keep: int) -> None:
        """Write and publish a checkpoint, then delete those beyond the newest `keep`."""
        name, rows = f"step-{counters.step:08d}", self._rows()
        if uses_deepspeed(self.accelerator):
            self._save_deepspeed(name, counters, rows)
        elif self.accelerator.is_main_process:
            checkpoint.write(self.folder, name, lambda staging: self._fill(staging, counters, rows))
        if self.accelerator.is_main_process:
            checkpoint.delete_older(self.folder, keep, than=name)
        self.accelerator.wait_for_everyone()

    def load(self, folder: Path) -> Counters:
        """Restore everything from `folder`, and return the counters."""
        if uses_deepspeed(self.accelerator):
            self.wrapped.load_checkpoint(str(folder), tag="deepspeed")
        else:
            tensors = load_file(folder / "model.safetensors")
            _check_same_weights(folder, tensors, state.trainable(self.module))
            state.load_trainable(self.module, tensors)
            state.load_optimizers(folder, self.optimizers)
        if self.average is not None:
            self.average.tensors = load_file(folder / "average.safetensors")
        if self.rollouts is not None and (rows := folder / "rollouts.safetensors").is_file():
            team = self.accelerator
            self.rollouts.recall(load_file(rows), team.process_index, team.num_processes)
        return Counters(**json.loads((folder / "trainer.json").read_text()))

    def _rows(self) -> Batch | None:
        """The rows that the models generated last, of all processes; None without such rows."""
        if self.rollouts is None or self.rollouts.kept is None:
            return None
        return self.rollouts.of_all(gather_object([self.rollouts.kept]))

    def _fill(self, folder: Path, counters: Counters, rows: Batch | None) -> None:
        state.save_tensors(folder / "model.safetensors", state.trainable(self.module))
        state.save_optimizers(folder, self.optimizers)
        self._fill_common(folder, counters, rows)

    def _fill_common(self, folder: Path, counters: Counters, rows: Batch | None) -> None:
        if rows is not None:
            state.save_tensors(folder / "rollouts.safetensors", rows)
        if self.average is not None:
            state.save_tensors(folder / "average.safetensors", self.average.tensors)
        (folder / "trainer.json").write_text(json.dumps(asdict(counters)))

    def _save_deepspeed(self, name: str, counters: Counters, rows: Batch | None) -> None:
        """DeepSpeed's own files as one part of the staged folder, under our manifest."""
        staging = staging_of(self.folder / name)
        if self.accelerator.is_main_process:
            shutil.rmtree(staging, ignore_errors=True)  # what a kill left
            staging.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.wrapped.save_checkpoint(str(staging), tag="deepspeed", exclude_frozen_parameters=True)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self._fill_common(staging, counters, rows)
            publish(staging, self.folder / name, manifest={}, replace=True)


def _check_same_weights(folder: Path, saved: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Raise RequestError for a checkpoint of another model than the one that is trained."""
    there, here = ({name: tuple(t.shape) for name, t in each.items()} for each in (saved, own))
    odd = sorted(name for name in there | here if there.get(name) != here.get(name))
    if odd:
        name = odd[0]
        raise RequestError(
            f"{folder} holds other weights than this recipe trains: {name} is "
            f"{there.get(name, 'absent')} there and {here.get(name, 'absent')} here ({len(odd)} "
            "differ). Give the recipe and the target that it was made with, or another checkpoint"
        )


def _unwrapped(wrapped: Any) -> optim.Optimizer:
    optimizer: optim.Optimizer = getattr(wrapped, "optimizer", wrapped)
    return optimizer
