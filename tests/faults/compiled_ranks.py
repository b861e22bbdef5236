"""A process of several whose objective is compiled, and how many graphs torch made there."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from draftsmith.trainers.loop import compiled
from faults import toy


def train(out: Path, compile: bool, parts: int) -> None:
    """The body of a process; `parts` processes share each row."""
    compiled.BACKEND = "aot_eager"
    loop = toy.loop_in(out, "eagle3", compile=compile, steps=4, validate_every=4, micro_rows=2, context_parallel=parts)
    toy.run(loop)
    if loop.compiled is not None:
        said = torch._dynamo.utils.counters
        told = {"graphs": dict(loop.compiled.graphs), "breaks": dict(said["graph_break"])}
        (out / f"graphs-{loop.accelerator.process_index}").write_text(json.dumps(told))
