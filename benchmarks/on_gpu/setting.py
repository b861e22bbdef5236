"""On what card the plan runs, how much of everything it measures, and what is known of the card by now.

Read next: `sections.py`, the plan itself.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from draftsmith.benchmarks.common.provenance import record_of
from draftsmith.benchmarks.common.records import Cell, Record
from draftsmith.benchmarks.on_gpu.shapes import SHAPES, Shape

NOMINAL = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12}
"""Bytes a second that the maker names, by a part of the card's name; of an A100 the one with 80 GB."""
TINY_NOTE = "tiny CPU mode: checks the script, measures nothing"


@dataclass(frozen=True)
class Setting:
    """Where, and how much."""

    out: Path
    device: torch.device = torch.device("cuda")
    dtype: torch.dtype = torch.bfloat16
    shapes: dict[str, Shape] = field(default_factory=lambda: SHAPES)
    context: int = 1024
    nodes: Sequence[int] = (1, 2, 3, 5, 9, 17, 65)
    rounds: int = 6
    repeats: int = 6
    """Calls between two events, back to back, so that launching one hides behind another."""
    answers: tuple[int, int] = (32, 160)
    """Tokens of two answers; a token's time is their difference, so prefill and recording drop out."""
    whole_rounds: int = 2
    steps: tuple[int, int] = (8, 56)
    """Tokens of two speculative answers; a step's time is their difference."""
    eager_steps: tuple[int, int] = (4, 20)
    drafted: int = 32_000
    top_k: int = 10
    row: int = 2048
    """Tokens of a training row."""
    chunks: Sequence[int] = (256, 2048)
    training_rounds: int = 4
    batches: Sequence[int] = (1, 5, 8)
    copied: int = 2_000_000_000
    product: int = 8192
    own_kernels: bool = True
    """Whether the decoder may take kernels of our own."""
    patience: int = 1
    """How many times its seconds a section may take."""
    tiny: bool = False
    known: dict[str, float] = field(default_factory=dict)
    """`copy`: bytes a second of a copy on this card."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def nominal(self) -> float | None:
        """The card's bandwidth by its maker; None where the name is not known."""
        name = torch.cuda.get_device_name(self.device) if self.cuda else ""
        return next((bandwidth for part, bandwidth in NOMINAL.items() if part in name), None)

    def prompt(self, vocabulary: int) -> list[int]:
        """As many token ids as the context has."""
        return [1 + at * 7919 % (vocabulary - 1) for at in range(self.context)]

    def record(self, rows: list[dict[str, Cell]], setup: str, **values: Any) -> Record:
        """A section's record."""
        device = Namespace(device=str(self.device))
        values |= {"target": None, "rows": rows, "setup": f"{TINY_NOTE + '. ' if self.tiny else ''}{setup}"}
        return record_of(device, **values)


def tiny(out: Path) -> Setting:
    """The same plan on a CPU."""
    small = {
        name: replace(shape, layers=4, hidden=32, heads=4, kv_heads=2, head_size=16, intermediate=64, vocabulary=128)
        for name, shape in SHAPES.items()
    }
    return Setting(
        out,
        device=torch.device("cpu"),
        dtype=torch.float32,
        shapes=small,
        context=8,
        nodes=(1, 2, 3, 5, 9),
        rounds=1,
        repeats=1,
        answers=(2, 6),
        whole_rounds=1,
        steps=(2, 8),
        eager_steps=(2, 8),
        drafted=64,
        top_k=4,
        row=16,
        chunks=(8, 16),
        training_rounds=1,
        batches=(1, 2),
        copied=2**16,
        product=32,
        patience=20,
        tiny=True,
    )


@contextmanager
def cudnn_attention(on: bool) -> Iterator[None]:
    """Scaled dot-product attention with or without cuDNN's kernels among those that it chooses from."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(on)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def release(device: torch.device) -> None:
    """Give back what nobody holds any more, and count peaks from here on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
