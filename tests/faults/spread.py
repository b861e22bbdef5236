"""One stage of a run that goes on with another number of processes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from draftsmith.errors import Stopped
from faults import toy

STEPS = 20


def stage(out: Path, first: int, stop_at: int | None, method: str) -> None:
    """The body of a process: steps `first` to `stop_at`; what rows it was given is in `out/rows-FIRST-RANK`."""
    loop = toy.loop_in(out, method, steps=STEPS, micro_rows=2, every=STEPS, validate_every=STEPS, validate_rows=3)
    with contextlib.nullcontext() if stop_at is None else contextlib.suppress(Stopped):
        toy.run(loop, stop_at=stop_at)
    steps = (STEPS if stop_at is None else stop_at) - first
    each = toy.BATCH // loop.accelerator.num_processes
    asked = loop.train_rows.asked[: steps * each]
    by_step = [asked[at : at + each] for at in range(0, len(asked), each)]
    (out / f"rows-{first}-{loop.accelerator.process_index}").write_text(json.dumps(by_step))
