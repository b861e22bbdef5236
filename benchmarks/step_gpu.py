"""What an EAGLE-3 training step costs at the size of an 8B target, random weights, on a CUDA device.

The target has Qwen3-8B's shape and is made on the device in bf16; the drafter is `eagle3-8b`'s, its forward pass
in bf16 autocast, its weights and AdamW in fp32. Parts take turns: the target's forward pass, forward and backward of
the drafter's seven passes over its own outputs, the update. Figures are medians of rounds; memory is what the
allocator held at most.

    python benchmarks/step_gpu.py --json step-gpu.json
    python benchmarks/step_gpu.py --tiny                  # on a CPU: checks the script
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers import eagle3
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.loop import optimizer
from draftsmith.trainers.student.architecture import fresh_model
from torch import Tensor

TINY_NOTE = "tiny CPU mode: checks the script, measures nothing"


@dataclass(frozen=True)
class Sizes:
    """Qwen3-8B's shape, and the recipe's row."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    layers: int = 36
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 12288
    vocabulary: int = 151_936
    drafted: int = 32_000
    tokens: int = 2048
    passes: int = 7
    rounds: int = 7


TINY = Sizes("cpu", torch.float32, 4, 32, 4, 2, 64, 128, 64, 16, 2, 2)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if not args.tiny and not torch.cuda.is_available():
        print("step_gpu: no CUDA device is visible; --tiny checks the script on a CPU", file=sys.stderr)
        return 2
    sizes = TINY if args.tiny else Sizes()
    rows = [measured(sizes, recompute=recompute) for recompute in (False, True)]
    record = assembled(rows, sizes, args)
    print(printed(record))
    finish(record, args.json)
    return 0


def measured(sizes: Sizes, *, recompute: bool) -> dict[str, Any]:
    """Seconds of the parts of a step, and memory."""
    torch.manual_seed(0)
    target = random_target(sizes)
    recipe = Recipe.model_validate(
        {"method": "eagle3", "eagle3": {"passes": sizes.passes, "recompute": recompute, "vocabulary": sizes.drafted}}
    )
    every = sizes.vocabulary // sizes.drafted
    chosen = range(0, every * sizes.drafted, every)
    goal = eagle3.Eagle3Objective(recipe, eagle3.student(recipe, target, chosen), target, nowhere)
    goal.module.to(sizes.device)
    fused = optimizer.fuses(torch.device(sizes.device))  # as the loop has it
    (updated,) = optimizer.build(goal.module, recipe.optimizer, fused=fused)
    batch = one_row(sizes)
    times: dict[str, list[float]] = {"target": [], "drafter": [], "update": []}
    for _ in range(sizes.rounds + 1):
        teacher_output = timed(times["target"], sizes, partial(goal.prepare, batch))
        timed(times["drafter"], sizes, partial(gradients, goal, batch, teacher_output, sizes))
        timed(times["update"], sizes, updated.step)
        updated.zero_grad()
    seconds = {name: median(each[1:]) for name, each in times.items()}  # the first one warms up
    whole = sum(seconds.values())
    memory = torch.cuda.max_memory_allocated() / 1e9 if sizes.device == "cuda" else None
    if sizes.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return {
        "recompute": "yes" if recompute else "no",
        **{name: 1e3 * each for name, each in seconds.items()},
        "rate": sizes.tokens / whole,
        "share": seconds["target"] / whole,
        "memory": memory,
    }


def gradients(goal: Any, batch: dict[str, Tensor], teacher_output: Any, sizes: Sizes) -> None:
    """Forward and backward of what is trained."""
    with torch.autocast(sizes.device, dtype=torch.bfloat16, enabled=sizes.device == "cuda"):
        loss = goal.module(batch, teacher_output)[0]
    (loss / sizes.tokens).backward()


def timed(seconds: list[float], sizes: Sizes, work: Callable[[], Any]) -> Any:
    """What some work gives, its time kept; on a device up to its end."""
    wait(sizes)
    began = time.perf_counter()
    made = work()
    wait(sizes)
    seconds.append(time.perf_counter() - began)
    return made


def wait(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()


def random_target(sizes: Sizes) -> Any:
    """The target's shape with random weights, made on the device in its own type."""
    config = ModelConfig(
        architecture="qwen3",
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.hidden // sizes.heads,
        intermediate=sizes.intermediate,
        tied=False,
        max_positions=max(16, sizes.tokens),
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(sizes.dtype)
    try:
        with torch.device(sizes.device):
            return fresh_model(config, vocabulary=sizes.vocabulary, eos=None).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def one_row(sizes: Sizes) -> dict[str, Tensor]:
    """A document as long as the row, all of it labels."""
    at_S = torch.arange(sizes.tokens)[None]
    row = {
        "input_ids": torch.randint(0, sizes.vocabulary, (1, sizes.tokens)),
        "positions": at_S,
        "documents": torch.zeros_like(at_S),
        "loss_mask": at_S > 0,
    }
    return {name: each.to(sizes.device) for name, each in row.items()}


def nowhere(_module: object, _folder: object) -> None:
    """Nothing is saved."""


def assembled(rows: list[dict[str, Any]], sizes: Sizes, args: argparse.Namespace) -> Record:
    """A row with and one without recomputation."""
    heads = {
        "`eagle3.recompute`": "{recompute}",
        "target": "{target} ms",
        "drafter, forward and backward": "{drafter} ms",
        "update": "{update} ms",
        "tokens/s": "{rate}",
        "target's share": "{share}",
        "memory": "{memory} GB",
    }
    return record_of(
        args,
        title="An EAGLE-3 step at 8B on a GPU",
        target=None,
        setup=f"{TINY_NOTE + '. ' if args.tiny else ''}Random weights: a target of {sizes.layers} layers, hidden "
        f"{sizes.hidden}, vocabulary {sizes.vocabulary:,}, in {sizes.dtype}; {sizes.passes} passes, "
        f"{sizes.drafted:,} tokens to draft; one row of {sizes.tokens:,} tokens; medians of {sizes.rounds} rounds.",
        formats={
            **dict.fromkeys(("target", "drafter", "update"), ".1f"),
            "rate": ",.0f",
            "share": ".0%",
            "memory": ".1f",
        },
        rows=rows,
        tables={"step-gpu": table_of(heads)},
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help=TINY_NOTE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
