"""A run's checkpoints: everything that a resumed run needs, written to disk and read back.

Trained weights, moments, the moving average, rows that the models generated, and counters; the
manifest says of which run (`launch/check/resume.py` compares that), on which rows, and in how many
processes. Under ZeRO-3 the first two are DeepSpeed's own files, under our manifest. `checkpoint.py` publishes
a folder of files as a whole or not at all; `state.py` turns each part into tensors. Read next: `loop.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from .sharding import (
    DEEPSPEED_FOLDER,
    check_pieces,
    check_whole,
    held_weights,
    in_pieces,
    put_together,
    take_apart,
    uses_deepspeed,
    whole_optimizer,
)
from .sums import total

_log = logging.getLogger(__name__)
_CHOOSE = ("probe.prompts", "probe.max_new_tokens", "probe.draft_length", "loop.validate_rows")
"""Values, by dotted path: under others, probes and held-out losses are no measure of the same thing as before."""


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
        micro_rows: Callable[[], int] | None = None,
        compiled: bool = False,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            wrapped, optimizers: as accelerate's `prepare` returns them for `module`.
            identity: what the run computes hangs on, by dotted path; empty: not known.
            rows: what is trained on; where they are `Hashed`, a checkpoint of others is refused.
            micro_rows: says how many rows a forward pass has now.
            compiled: whether parts run as torch.compile makes them.
        """
        self.folder, self.accelerator = folder, accelerator
        self.identity, self._train_rows, self._micro_rows = identity, rows, micro_rows
        self._compiled = compiled
        self.wrapped, self.module = wrapped, module
        self.optimizers = [_unwrapped(each) for each in optimizers]
        self.average, self.rollouts = average, rollouts

    @property
    def manifest(self) -> dict[str, Any]:
        """What the manifest says beside its files."""
        known = {"recipe": dict(self.identity), "rows": self._rows_hash}
        return self.rounding | {name: each for name, each in known.items() if each}

    @property
    def rounding(self) -> dict[str, int]:
        """What the order of sums, and with it their last bits, hangs on beside the recipe."""
        known = {"processes": self.accelerator.num_processes, "threads": torch.get_num_threads()}
        known["compile"] = self._compiled
        return known if self._micro_rows is None else known | {"micro_rows": self._micro_rows()}

    @cached_property
    def _rows_hash(self) -> str | None:
        return self._train_rows.content_hash() if isinstance(self._train_rows, Hashed) else None

    def save(self, counters: Counters, *, keep: int) -> None:
        """Write and publish a checkpoint, then delete those beyond the newest `keep`.

        Raises:
            TrainingFailed: a weight is not finite; older checkpoints stay. EnvironmentFailure: the disk is
                full, or memory ran out twice.
        """
        name, rows = checkpoint.name_of(counters.step), self._rows()
        if uses_deepspeed(self.accelerator):
            bad = _not_finite(held_weights(self.module))
            if total(self.accelerator, len(bad)):  # all leave together
                raise _broken(bad, counters.step)
            if self._zero is None:
                self._save_deepspeed(name, counters, rows)
            else:
                self._save_whole(self._zero, name, counters, rows)
        elif self.accelerator.is_main_process:
            if bad := _not_finite(state.trainable(self.module).items()):
                raise _broken(bad, counters.step)
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
        if uses_deepspeed(self.accelerator) and (self._zero is None or in_pieces(folder)):
            check_pieces(folder, self.accelerator.num_processes)
            self.wrapped.load_checkpoint(str(folder), tag=DEEPSPEED_FOLDER)
        else:
            check_whole(folder)
            tensors = load_file(folder / "model.safetensors")
            _check_same_weights(folder, tensors, state.trainable(self.module))
            state.load_trainable(self.module, tensors)
            if self._zero is None:
                state.load_optimizers(folder, self.optimizers)
            else:
                take_apart(self._zero, self.module, tensors, state.read_optimizer(folder))
        self._compare_rounding(folder)
        if self.average is not None:
            self.average.load(load_file(folder / "average.safetensors"))
        if self.rollouts is not None and (rows := folder / "rollouts.safetensors").is_file():
            team = self.accelerator
            self.rollouts.recall(load_file(rows), team.process_index, team.num_processes)
        return Counters(**json.loads((folder / "trainer.json").read_text()))

    def best_of(self, counters: Counters, folder: Path) -> dict[str, float] | None:
        """The best so far; None where this run measures it otherwise than the one of `folder`: the next will be."""
        there = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("recipe")
        here = json.loads(json.dumps(dict(self.identity)))
        before = there if isinstance(there, dict) else {}
        if counters.best is None or all(before.get(name, here.get(name)) == here.get(name) for name in _CHOOSE):
            return counters.best
        _log.info("probes or held-out rows are others than before %s: the next ones choose the best anew", folder)
        return None

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

    def _save_whole(self, zero: Any, name: str, counters: Counters, rows: Batch | None) -> None:
        """What DeepSpeed holds in pieces as one state, in the files of a run without it."""
        weights, optimizer = put_together(zero, self.module)

        def fill(staging: Path) -> None:
            state.save_tensors(staging / "model.safetensors", weights)
            state.write_optimizers(staging, [optimizer])
            self._fill_common(staging, counters, rows)

        if self.accelerator.is_main_process:
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

    @property
    def _zero(self) -> Any | None:
        """DeepSpeed's optimiser where its state is saved whole, as without DeepSpeed."""
        return whole_optimizer(self.wrapped) if uses_deepspeed(self.accelerator) else None

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
        self.wrapped.save_checkpoint(str(staging), tag=DEEPSPEED_FOLDER, exclude_frozen_parameters=True)
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

    def _compare_rounding(self, folder: Path) -> None:
        """Say where the rest will not be the same bits; earlier versions wrote less of it."""
        there, here = _manifest(folder), self.rounding
        other = [name for name, now in here.items() if there.get(name, now) != now]
        if other and self.accelerator.is_main_process:
            _log.warning(
                "%s goes on otherwise: %s. The same rows in the same order, but sums are rounded otherwise, so the "
                "rest is no longer the same bits",
                folder,
                ", ".join(f"{name} {there[name]} before and {here[name]} now" for name in other),
            )


def _manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of weights that are not finite: every step behind a checkpoint with them would fail."""
    return [*dict.fromkeys(name for name, tensor in tensors if not torch.isfinite(tensor).all())]


def _broken(names: Sequence[str], step: int) -> TrainingFailed:
    """What is said of them; `names` is empty on a process whose own weights are finite."""
    more = f", and {len(names) - 1} more" if len(names) > 1 else ""
    which = f"{names[0]} is not finite{more}" if names else "a weight of another process is not finite"
    return TrainingFailed(
        f"behind step {step} {which}, though every step that was taken was: no checkpoint is written, older ones are "
        "whole. The same command continues from the newest; where it ends here again, lower optimizer.lr, or test "
        "this machine's memory"
    )


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
