"""Over-training in miniature: tau and the held-out loss against steps, on far too few rows.

A recipe is trained on `--rows` rows only, decoding for real and measuring the held-out loss every
`--every` steps. Printed: the loss that falls, the held-out loss that turns, tau, and which step
each of the three would have chosen. The run keeps the checkpoint with the best tau.

    python benchmarks/over_training.py --out runs/over-training
    python benchmarks/over_training.py --recipe medusa-tiny --rows 40 --steps 200 --every 20
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Point(NamedTuple):
    """What was measured behind one step."""

    step: int
    loss: float
    """Of the last training steps, as the recipe's objective counts it."""
    validation_loss: float
    tau: float


def main() -> None:
    args = arguments()
    train(args)
    points = read(args.out / "metrics.jsonl")
    print(f"{args.recipe}, {args.rows} rows, {args.steps} steps of {args.batch_rows} rows")
    print("\n".join(table(points)))
    print("\n".join(choices(points)))


def train(args: argparse.Namespace) -> None:
    every = str(args.every)
    values = {
        "data.limit_rows": str(args.rows),
        "loop.steps": str(args.steps),
        "loop.batch_rows": str(args.batch_rows),
        "loop.micro_rows": str(args.batch_rows),
        "loop.log_every": every,
        "loop.validate_every": every,
        "probe.every_steps": every,
        "probe.prompts": str(args.prompts),
        "checkpoint.every_steps": every,
    }
    words = [word for key, value in values.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "draftsmith.launch.train", args.recipe]
    done = subprocess.run([*command, "--out", str(args.out), *words], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def read(metrics: Path) -> list[Point]:
    """The records of a run, those of one step together."""
    found: dict[int, dict[str, float]] = {}
    names = {"train": ("loss", "loss"), "validation": ("validation_loss", "validation_loss"), "probe": ("tau", "tau")}
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] in names:
            name, key = names[record["kind"]]
            found.setdefault(record["step"], {})[name] = record[key]
    return [Point(step, **values) for step, values in sorted(found.items()) if len(values) == len(names)]


def table(points: list[Point]) -> list[str]:
    rows = [f"| {p.step} | {p.loss:.3f} | {p.validation_loss:.3f} | {p.tau:.2f} |" for p in points]
    return ["| step | training loss | held-out loss | tau (T = 0) |", "|---|---|---|---|", *rows]


def choices(points: list[Point]) -> list[str]:
    """Which step each measure would keep, and what tau that is."""
    measures: dict[str, Callable[[Point], float]] = {
        "tau": lambda p: p.tau,
        "held-out loss": lambda p: -p.validation_loss,
        "training loss": lambda p: -p.loss,
        "the last step": lambda p: p.step,
    }
    lines = []
    for name, measure in measures.items():
        best = max(points, key=measure)
        lines.append(f"chosen by {name}: step {best.step}, tau {best.tau:.2f}")
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="eagle-tiny")
    parser.add_argument("--out", type=Path, default=Path("runs/over-training"))
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--batch-rows", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=24)
    return parser.parse_args()


if __name__ == "__main__":
    main()
