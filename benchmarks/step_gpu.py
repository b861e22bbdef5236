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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.benchmarks.on_gpu.setting import Setting, release
from draftsmith.benchmarks.on_gpu.shapes import QWEN3_8B, Shape, random_model
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers import eagle3
from draftsmith.trainers.loop import optimizer
from torch import Tensor

TINY_NOTE = "tiny CPU mode: checks the script, measures nothing"


@dataclass(frozen=True)
class Sizes:
    """The target's shape, and the recipe's row."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    shape: Shape = QWEN3_8B
    drafted: int = 32_000
    tokens: int = 2048
    passes: int = 7
    rounds: int = 7
    chunks: Sequence[int] = (256, 2048)


SMALL = replace(QWEN3_8B, layers=4, hidden=32, heads=4, kv_heads=2, head_size=8, intermediate=64, vocabulary=128)
TINY = Sizes("cpu", torch.float32, SMALL, 64, 16, 2, 2, (8, 16))


def sizes_of(setting: Setting) -> Sizes:
    """What `gpu.py` measures of it."""
    shape, passes = setting.shapes[QWEN3_8B.name], 2 if setting.tiny else Sizes.passes
    return Sizes(
        setting.device.type,
        setting.dtype,
        shape,
        setting.drafted,
        setting.row,
        passes,
        setting.training_rounds,
        setting.chunks,
    )


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if not args.tiny and not torch.cuda.is_available():
        print("step_gpu: no CUDA device is visible; --tiny checks the script on a CPU", file=sys.stderr)
        return 2
    sizes = TINY if args.tiny else Sizes()
    rows = [measured(sizes, recompute=recompute, chunk=chunk) for chunk in sizes.chunks for recompute in (False, True)]
    record = assembled(rows, sizes, args)
    print(printed(record))
    finish(record, args.json)
    return 0


def measured(sizes: Sizes, *, recompute: bool, chunk: int) -> dict[str, Any]:
    """Seconds of the parts of a step, and memory behind the first one."""
    device = torch.device(sizes.device)
    target = random_model(sizes.shape, device, sizes.dtype, positions=max(16, sizes.tokens))
    recipe = Recipe.model_validate(
        {
            "method": "eagle3",
            "eagle3": {"passes": sizes.passes, "recompute": recompute, "vocabulary": sizes.drafted},
            "objective": {"chunk": chunk},
        }
    )
    every = sizes.shape.vocabulary // sizes.drafted
    chosen = range(0, every * sizes.drafted, every)
    goal = eagle3.Eagle3Objective(recipe, eagle3.student(recipe, target, chosen), target, nowhere)
    goal.module.to(sizes.device)
    fused = optimizer.fuses(torch.device(sizes.device))  # as the loop has it
    (updated,) = optimizer.build(goal.module, recipe.optimizer, fused=fused)
    batch = one_row(sizes)
    times: dict[str, list[float]] = {"target": [], "drafter": [], "update": []}
    for number in range(sizes.rounds + 1):
        if number == 1:
            release(device)  # the peak is that of a step, not of making the weights
        teacher_output = timed(times["target"], sizes, partial(goal.prepare, batch))
        timed(times["drafter"], sizes, partial(gradients, goal, batch, teacher_output, sizes))
        timed(times["update"], sizes, updated.step)
        updated.zero_grad()
    seconds = {name: median(each[1:]) for name, each in times.items()}  # the first one warms up
    whole = sum(seconds.values())
    memory = torch.cuda.max_memory_allocated() / 1e9 if sizes.device == "cuda" else None
    return {
        "chunk": f"{chunk:,}",
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


def one_row(sizes: Sizes) -> dict[str, Tensor]:
    """A document as long as the row, all of it labels."""
    at_S = torch.arange(sizes.tokens)[None]
    row = {
        "input_ids": torch.randint(0, sizes.shape.vocabulary, (1, sizes.tokens)),
        "positions": at_S,
        "documents": torch.zeros_like(at_S),
        "loss_mask": at_S > 0,
    }
    return {name: each.to(sizes.device) for name, each in row.items()}


def nowhere(_module: object, _folder: object) -> None:
    """Nothing is saved."""


def assembled(rows: list[dict[str, Any]], sizes: Sizes, args: Any, notes: Sequence[str] = ()) -> Record:
    """A row for each size of a chunk, with and without recomputation."""
    shape = sizes.shape
    heads = {
        "`objective.chunk`": "{chunk}",
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
        setup=f"{TINY_NOTE + '. ' if args.tiny else ''}Random weights: a target of {shape.layers} layers, hidden "
        f"{shape.hidden}, vocabulary {shape.vocabulary:,}, in {sizes.dtype}; {sizes.passes} passes, "
        f"{sizes.drafted:,} tokens to draft; one row of {sizes.tokens:,} tokens; medians of {sizes.rounds} rounds. "
        "Good are 9,000 tokens/s in at most 32 GB, the target at most 45 % of the step.",
        formats={
            **dict.fromkeys(("target", "drafter", "update"), ".1f"),
            "rate": ",.0f",
            "share": ".0%",
            "memory": ".1f",
        },
        rows=rows,
        tables={"step-gpu": table_of(heads)},
        notes=list(notes),
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help=TINY_NOTE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
