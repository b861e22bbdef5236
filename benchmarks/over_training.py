"""Over-training in miniature: tau and the held-out loss against steps, on far too few rows.

A recipe is trained on `--rows` rows only, once a training seed, decoding for real and measuring the
held-out loss every `--every` steps. Printed: the loss that falls, the held-out loss that turns, tau,
and which step each of the three would have chosen. The run keeps the checkpoint with the best tau.

    python benchmarks/over_training.py --out runs/over-training
    python benchmarks/over_training.py --recipe medusa-tiny --rows 40 --steps 200 --every 20
    python benchmarks/over_training.py --out runs/over-3 --seeds 0,1,2 --json over-training.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, named_by_seed, record_of, target_weights
from draftsmith.benchmarks.common.records import Figure, Record, table_of
from draftsmith.benchmarks.common.runs import by_seed, parser_of, settings_of, trained
from draftsmith.eval.measure.arms import NOT_AUDITED
from draftsmith.launch.recipe.load import load_recipe


class Point(NamedTuple):
    """What was measured behind one step."""

    step: int
    loss: float
    """Of the last training steps, as the recipe's objective counts it."""
    validation_loss: float
    tau: float


def main() -> None:
    args = arguments()
    parts = by_seed(args)
    runs = [train(part) for part in parts]
    curves = [read(run / "metrics.jsonl") for run in runs]
    record = assembled(curves, runs, args)
    print(printed(record))
    finish(record, args.json)


def train(args: argparse.Namespace) -> Path:
    """The run's folder, trained now if it is not finished."""
    values = {
        "data.limit_rows": args.rows,
        "loop.steps": args.steps,
        "loop.batch_rows": args.batch_rows,
        "loop.micro_rows": args.batch_rows,
        "loop.log_every": args.every,
        "loop.validate_every": args.every,
        "probe.every_steps": args.every,
        "probe.prompts": args.prompts,
        "checkpoint.every_steps": args.every,
    }
    return trained(args.recipe, args.out, values | settings_of(args))


def read(metrics: Path) -> list[Point]:
    """The records of a run, those of one step together."""
    records: dict[int, dict[str, float]] = {}
    names = {"train": ("loss", "loss"), "validation": ("validation_loss", "validation_loss"), "probe": ("tau", "tau")}
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] in names:
            name, key = names[record["kind"]]
            records.setdefault(record["step"], {})[name] = record[key]
    return [Point(step, **values) for step, values in sorted(records.items()) if len(values) == len(names)]


def assembled(curves: Sequence[list[Point]], runs: Sequence[Path], args: argparse.Namespace) -> Record:
    """A row per step that was measured: means over the seeds."""
    heads = {
        "step": "{step}",
        "training loss": "{training_loss}",
        "held-out loss": "{held_out_loss}",
        "tau (T = 0)": "{tau}",
    }
    drafters = named_by_seed(args.recipe, [run / "drafter" for run in runs], args.seeds)
    return record_of(
        args,
        title="Over-training on few rows",
        target=target_weights(load_recipe(args.recipe, args.set).recipe.target.path),
        drafters=drafter_weights(drafters),
        setup=f"{args.recipe}, {args.rows} rows, {args.steps} steps of {args.batch_rows} rows; tau at T = 0 on "
        f"{args.prompts} prompts of held-out files.",
        audit={"verdict": NOT_AUDITED, "sees": "tau of the probe that steers training"},
        formats={"step": ".0f", "training_loss": ".3f", "held_out_loss": ".3f", "tau": ".2f"},
        rows=[row_of(points) for points in zip(*curves, strict=True)],
        tables={"over-training": table_of(heads)},
        notes=[line for seed, points in zip(args.seeds, curves) for line in choices(points, seed, args)],
    )


def row_of(points: Sequence[Point]) -> dict[str, Any]:
    """One step of all seeds."""
    return {
        "step": points[0].step,
        "training_loss": mean([point.loss for point in points]),
        "held_out_loss": mean([point.validation_loss for point in points]),
        "tau": mean([point.tau for point in points]),
    }


def mean(values: Sequence[float]) -> Figure:
    """Over seeds, without an interval over prompts: a probe keeps none."""
    middle = sum(values) / len(values)
    return Figure(value=middle, seeds=list(values)) if len(values) > 1 else Figure(value=middle)


def choices(points: list[Point], seed: int, args: argparse.Namespace) -> list[str]:
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
        of_seed = f"seed {seed}, " if len(args.seeds) > 1 else ""
        lines.append(f"{of_seed}chosen by {name}: step {best.step}, tau {best.tau:.2f}")
    return lines


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, out="runs/over-training")
    parser.add_argument("--recipe", default="eagle-tiny")
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--batch-rows", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=24)
    return parser.parse_args()


if __name__ == "__main__":
    main()
