"""A process of several whose draft's layers are computed again, or are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.trainers.config import ModelConfig
from faults import toy

SIZES = {"layers": 3, "hidden": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "max_positions": 64}


def draft(recompute: bool) -> dict[str, Any]:
    return {"model": ModelConfig(**SIZES, recompute=recompute)}


def train(out: Path, recompute: bool) -> None:
    """The body of a process."""
    toy.run(toy.loop_in(out, "distill", given=draft(recompute), steps=4, micro_rows=2, validate_every=4))
