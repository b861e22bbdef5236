"""A run's checkpoints: everything that a resumed run needs, written to disk and read back.

Trained weights, moments, the moving average, rows that the models generated, and counters; the
manifest says of which run (`launch/train/resume.py` compares that), on which rows, and in how many
processes. With DeepSpeed the first two are its own files, under our manifest. `checkpoint.py` publishes
a folder of files as a whole or not at all; `state.py` turns each part into tensors. Read next: `loop.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import load_file
from torch import Tensor, nn, optim

from ...errors import RequestError, TrainingFailed
from ...storage import MANIFEST, check_identity, delete_leftovers, publish, staging_of
from . import checkpoint, state
from .memory import explain_out_of_memory, free_memory, is_out_of_memory
from .objective import Batch, RowWriter
from .sharding import uses_deepspeed

_DEEPSPEED = "deepspeed"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counters:
    """A run's counters after the step that is saved."""

    step: int
    best: dict[str, float] | None
    skipped: int
    bad_steps: int


@runtime_checkable
class Hashed(Protocol):
    """Rows that can be told from others."""

    def content_hash(self) -> str: ...


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
        identity: Mapping[str, Any],
        rows: object = None,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            wrapped, optimizers: as accelerate's `prepare` returns them for `module`.
            identity: what the run computes hangs on, by dotted path; empty: not known.
            rows: what is trained on; where they are `Hashed`, a checkpoint of others is refused.
        """
        self.folder, self.accelerator = folder, accelerator
        self.identity, self._train_rows = identity, rows
        self.wrapped, self.module = wrapped, module
        self.optimizers = [_unwrapped(each) for each in optimizers]
        self.average, self.rollouts = average, rollouts

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """What the manifest says beside its files."""
        known = {"recipe": dict(self.identity), "rows": self._rows_hash}
        return {"processes": self.accelerator.num_processes} | {name: each for name, each in known.items() if each}

    @cached_property
    def _rows_hash(self) -> str | None:
        return self._train_rows.content_hash() if isinstance(self._train_rows, Hashed) else None

    def save(self, counters: Counters, *, keep: int) -> None:
        """Write and publish a checkpoint, then delete those beyond the newest `keep`.

        Raises:
            TrainingFailed: a weight is not finite; older checkpoints stay. EnvironmentFailure: the disk is
                full, or memory ran out twice.
        """
        name, rows = f"step-{counters.step:08d}", self._rows()
        if uses_deepspeed(self.accelerator):
            self._save_deepspeed(name, counters, rows)
        elif self.accelerator.is_main_process:
            _check_finite(state.trainable(self.module), counters.step)
            self._write(name, counters, rows)
        if self.accelerator.is_main_process:
            checkpoint.delete_older(self.folder, keep, than=name)
        self.accelerator.wait_for_everyone()

    def load(self, folder: Path) -> Counters:
        """Restore everything from `folder`, and return the counters.

        Raises:
            RequestError: it is of other rows, or other weights, or another kind of launch wrote it.
        """
        self._check_rows(folder)
        if uses_deepspeed(self.accelerator):
            check_pieces(folder, self.accelerator.num_processes)
            self.wrapped.load_checkpoint(str(folder), tag=_DEEPSPEED)
        else:
            check_whole(folder)
            tensors = load_file(folder / "model.safetensors")
            _check_same_weights(folder, tensors, state.trainable(self.module))
            state.load_trainable(self.module, tensors)
            state.load_optimizers(folder, self.optimizers)
        self._compare_processes(folder)
        if self.average is not None:
            self.average.tensors = load_file(folder / "average.safetensors")
        if self.rollouts is not None and (rows := folder / "rollouts.safetensors").is_file():
            team = self.accelerator
            self.rollouts.recall(load_file(rows), team.process_index, team.num_processes)
        return Counters(**json.loads((folder / "trainer.json").read_text()))

    def _write(self, name: str, counters: Counters, rows: Batch | None) -> None:
        """Write and publish; where memory runs out on the way, once more with what can be freed."""

        def fill(staging: Path) -> None:
            self._fill(staging, counters, rows)

        try:
            checkpoint.write(self.folder, name, fill, manifest=self.manifest)
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("memory ran out while %s was written; it is written again", name)
        free_memory()  # behind the handler: its error holds copies of the weights
        with explain_out_of_memory(f"twice while {name} was written"):
            checkpoint.write(self.folder, name, fill, manifest=self.manifest)

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
            self.folder.mkdir(parents=True, exist_ok=True)
            delete_leftovers(self.folder)
            staging.mkdir()
        if self.accelerator.num_processes > 1:  # all write where the first one does
            (staging,) = broadcast_object_list([staging])
        self.accelerator.wait_for_everyone()
        self.wrapped.save_checkpoint(str(staging), tag=_DEEPSPEED, exclude_frozen_parameters=True)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self._fill_common(staging, counters, rows)
            publish(staging, self.folder / name, manifest=checkpoint.written_by() | self.manifest, replace=True)

    def _check_rows(self, folder: Path) -> None:
        """Refuse a checkpoint of other rows; those of earlier versions do not say."""
        there = _manifest(folder).get("rows")
        if there is not None and self._rows_hash is not None:
            remedy = (
                "The files behind data.source have changed, or how they are read: give the same rows to go on, "
                "or begin in another --out"
            )
            check_identity(folder, {"rows": there}, {"rows": self._rows_hash}, remedy=remedy)

    def _compare_processes(self, folder: Path) -> None:
        """Say where the rest will not be the same bits."""
        now = self.accelerator.num_processes
        before = _manifest(folder).get("processes", now)
        if before != now and self.accelerator.is_main_process:
            _log.warning(
                "%s was saved by %d processes and goes on with %d: the same rows in the same order, but sums are "
                "rounded otherwise, so the rest is no longer the same bits",
                folder,
                before,
                now,
            )


def _manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))


def _check_finite(tensors: dict[str, Tensor], step: int) -> None:
    """Raise TrainingFailed for a weight that is not finite: every step behind such a checkpoint would fail."""
    bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if bad:
        raise TrainingFailed(
            f"behind step {step} {bad[0]} is not finite ({len(bad)} of {len(tensors)} tensors), though every step "
            "that was taken was: no checkpoint is written, older ones are whole. The same command continues from "
            "the newest; where it ends here again, lower optimizer.lr, or test this machine's memory"
        )


def check_whole(folder: Path) -> None:
    """Raise RequestError for a checkpoint in DeepSpeed's pieces, which a run without it cannot read."""
    if (folder / _DEEPSPEED).is_dir():
        raise RequestError(
            f"{folder} was written under DeepSpeed ({_pieces(folder)} processes), and this run is without it; "
            "launch with the same configuration (launch/configs/zero2.yaml or zero3.yaml) to go on"
        )


def check_pieces(folder: Path, processes: int) -> None:
    """Raise RequestError for a checkpoint without DeepSpeed's state, or of another number of processes.

    DeepSpeed itself would go on without weights, silently, where it finds none.
    """
    if not (folder / _DEEPSPEED).is_dir():
        raise RequestError(
            f"{folder} was written without DeepSpeed, and this run is under it; launch as it was launched "
            "to go on, or begin in another --out"
        )
    if (pieces := _pieces(folder)) != processes:
        raise RequestError(
            f"{folder} holds DeepSpeed's state in {pieces} pieces, and this run has {processes} processes; "
            f"launch with --num_processes {pieces} to go on"
        )


def _pieces(folder: Path) -> int:
    """How many processes hold a piece of the optimiser's state."""
    return len([*(folder / _DEEPSPEED).glob("*_optim_states.pt")])


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
