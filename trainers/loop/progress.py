"""Reports of a run: `metrics.jsonl` always, a progress bar or lines, and copies for trackers.

Read next: `loop.py`.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from ...bars import bar, is_watched
from ...errors import EnvironmentFailure, RequestError
from ...storage import write_text
from .sums import add_terms, means, totals

if TYPE_CHECKING:
    from accelerate import Accelerator

_log = logging.getLogger(__name__)


class Record:
    """`metrics.jsonl`: one JSON object a line, flushed at once. Rank 0 alone writes."""

    def __init__(self, path: Path, *, after: int, active: bool) -> None:
        """Keep the records up to step `after`: a resumed run writes those of the steps it repeats again."""
        self._file = None
        if active:
            if path.is_file():
                write_text(path, "".join(_lines_up_to(path, after)))
            self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _lines_up_to(path: Path, step: int) -> list[str]:
    return [line + "\n" for line, record in records(path) if record["step"] <= step]


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a `metrics.jsonl`, parsed; a line that a kill cut short is skipped."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
            complete = record["kind"] is not None and record["step"] is not None
        except (ValueError, KeyError, TypeError):
            continue
        if complete:
            yield line, record


class Meter:
    """Means of the loss terms and of the clock between two reports."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._labels = self._tokens = 0.0
        self._waited = 0.0
        self._rollout_seconds: float | None = None
        self._start = time.perf_counter()

    def add(self, sums: dict[str, Tensor], labels: float, tokens: int, waited: float) -> None:
        """Add a step; `sums` of the terms in this process, scalars where they were made."""
        add_terms(self._sums, sums)
        self._labels += labels
        self._tokens += tokens
        self._waited += waited

    def add_rollouts(self, seconds: float) -> None:
        """Time in which the models generated rows of a step."""
        self._rollout_seconds = (self._rollout_seconds or 0.0) + seconds

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """Mean of each term over the labelled tokens of all processes since the last restart.

        Where none of them was compared with anything there is no loss, and `labels` is 0.
        """
        found = means(totals(accelerator, self._sums), self._labels)
        return found if "loss" in found or not self._labels else {"labels": 0.0, **found}

    def clock(self) -> dict[str, float]:
        """Tokens per second, shares of the time spent waiting for data and generating rows, and memory
        in GB."""
        seconds = time.perf_counter() - self._start
        rollouts = {} if self._rollout_seconds is None else {"rollout_share": self._rollout_seconds / seconds}
        return rollouts | {
            "tokens_per_second": self._tokens / seconds,
            "data_wait": self._waited / seconds,
            "memory_gb": memory_gb(),
        }


def memory_gb() -> float:
    """Peak memory of the GPU where there is one, else this process's resident memory now."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return float(psutil.Process(os.getpid()).memory_info().rss) / 1e9


class Screen:
    """A bar on a terminal, one key=value line per report elsewhere."""

    def __init__(self, steps: int, *, first: int, active: bool) -> None:
        self._steps, self._active = steps, active
        self._began, self._first = time.perf_counter(), first
        self._warned, self._told = not active, False
        self._bar = bar(total=steps, initial=first, disable=not (active and is_watched()), unit="step")

    def step(self) -> None:
        self._bar.update()

    def report(self, step: int, values: dict[str, float]) -> None:
        if not self._active:
            return
        self._warn_of_no_label(step, values)
        shown = {name: _short(value) for name, value in values.items()}
        if self._bar.disable:
            line = " ".join(f"{name}={value}" for name, value in shown.items())
            _log.info("step=%d/%d %s eta=%s", step, self._steps, line, self._eta(step))
        else:
            self._bar.set_postfix(shown)

    def _warn_of_no_label(self, step: int, values: dict[str, float]) -> None:
        """Say, once in a run, why a line has no loss."""
        if values.get("labels") != 0 or self._told:
            return
        self._told = True
        _log.warning(
            "step %d: no token since the last line was compared (labels=0), so there is no loss and nothing was "
            "learnt: rows are shorter than what is drafted, or the draft vocabulary has none of the target's "
            "likeliest tokens",
            step,
        )

    def warn_of_no_loss(self, step: int, values: dict[str, float], rows: int) -> None:
        """Say, once in a run, where held-out rows had nothing to compare."""
        if "validation_loss" in values:
            return
        if not self._warned:
            _log.warning(
                "step %d: in none of the %d held-out rows was a token compared, so there is no held-out loss, and no "
                "step is the best by it; expected rows that are longer than what is drafted, and tokens that the "
                "draft vocabulary has: see data.validation, loop.validate_rows and data.sequence_length",
                step,
                rows,
            )
        self._warned = True

    def close(self) -> None:
        self._bar.close()

    def _eta(self, step: int) -> str:
        done = max(1, step - self._first)
        left = (time.perf_counter() - self._began) / done * (self._steps - step)
        return f"{int(left // 60)}m{int(left % 60):02d}s"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


TRACKED = "trackers.json"
"""By what name trackers know the run of a folder."""


def begin_trackers(accelerator: Accelerator, trackers: Sequence[str], out: Path) -> None:
    """Start the trackers; a run that was stopped goes on in the record that it began, by the id that its folder keeps.

    TensorBoard needs none: its files lie in the folder.

    Raises:
        RequestError: the file with the ids is damaged. EnvironmentFailure: a tracker cannot start.
    """
    kept = _tracked(out / TRACKED)
    ids = {name: kept.get(name) or (None if name == "mlflow" else uuid.uuid4().hex) for name in trackers}
    place = {} if os.environ.get("WANDB_DIR") else {"dir": str(out)}
    given: dict[str, dict[str, Any]] = {
        "wandb": {"id": ids.get("wandb"), "name": out.name, "resume": "allow", **place},
        "trackio": {"name": f"{out.name}-{str(ids.get('trackio'))[:8]}", "resume": "allow"},
        "mlflow": {"run_id": ids.get("mlflow"), "run_name": out.name},
    }
    try:
        accelerator.init_trackers("draftsmith", init_kwargs={name: given[name] for name in trackers if name in given})
    except Exception as error:  # any back-end may raise anything
        said = next(iter(str(error).strip().splitlines()), "")[:300]
        raise EnvironmentFailure(
            f"loop.trackers ({', '.join(trackers)}) cannot start: {type(error).__name__} ({said}); see its settings, "
            "or leave it out: metrics.jsonl is always written"
        ) from error
    if not accelerator.is_main_process:
        return
    if "mlflow" in trackers:
        ids["mlflow"] = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
    if known := {name: ids[name] for name in trackers if name in given}:
        write_text(out / TRACKED, json.dumps(kept | known, indent=1) + "\n")


def _tracked(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept, dict) and all(isinstance(each, str) for each in kept.values()):
            return kept
    except (ValueError, RecursionError):
        pass
    raise RequestError(
        f"{path} is damaged: expected trackers' names and the ids of this run; move it away, and trackers begin anew"
    )


def copy_to_trackers(accelerator: Accelerator, values: dict[str, float], step: int) -> None:
    """Copy metrics to the trackers; an error of a tracker is logged and never ends a run."""
    try:
        accelerator.log(values, step=step)
    except Exception as error:  # noqa: BLE001 - any back-end may raise anything
        _log.warning("a tracker refused step %d: %s", step, error)
