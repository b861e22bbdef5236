"""A process of a launch that runs a command, and notes which rows of its data set the training loop gives it.

    accelerate launch ... -m draftsmith.benchmarks.common.noted_run NOTES KILLED_AT train RECIPE --out RUN ...

Behind NOTES, a folder, and KILLED_AT everything is the real command line. KILLED_AT is the step, counted from 0, in
front of which the last process of the launch kills itself (SIGKILL), or `never`. Read next: `../two_ranks.py`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from draftsmith.launch.cli import main as command
from draftsmith.trainers.loop.loop import Loop, TrainingRows
from draftsmith.trainers.loop.objective import Batch

NEVER = "never"


class Noted:
    """Rows that write down which of them were asked for, a line each time."""

    def __init__(self, rows: TrainingRows, path: Path) -> None:
        self._rows, self._path = rows, path

    def __len__(self) -> int:
        return len(self._rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def batch(self, rows: list[int]) -> Batch:
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(rows) + "\n")
        return self._rows.batch(rows)


def run(notes: Path, killed_at: str, words: Sequence[str]) -> int:
    """The command's exit code, which `accelerate launch` would make a 1 of; also in `notes/code-RANK`."""
    rank, world = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
    begin, step = Loop.__init__, Loop.train_step

    def begin_noted(loop: Loop, *given: Any, **named: Any) -> None:
        begin(loop, *given, **named)
        loop.train_rows = Noted(loop.train_rows, notes / f"rows-{rank}")

    def step_or_end(loop: Loop, number: int, *given: Any) -> None:
        if str(number) == killed_at and int(rank) == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(loop, number, *given)

    notes.mkdir(parents=True, exist_ok=True)
    with mock.patch.multiple(Loop, __init__=begin_noted, train_step=step_or_end):
        code = command(list(words))
    (notes / f"code-{rank}").write_text(str(code), encoding="utf-8")
    return code


def read_rows(notes: Path) -> Counter[int]:
    """How often each row was asked for, by all processes together."""
    lines = [line for path in notes.glob("rows-*") for line in path.read_text(encoding="utf-8").splitlines()]
    return Counter(row for line in lines for row in json.loads(line))


def read_codes(notes: Path) -> list[int]:
    """Exit codes of the processes that lived to have one."""
    return [int(path.read_text(encoding="utf-8")) for path in sorted(notes.glob("code-*"))]


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
