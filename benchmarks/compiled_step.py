"""A training step with `loop.compile` beside the same step without, in one interleaved run.

Every recipe is made into two loops as `draftsmith train` makes them, of equal weights and rows; they take a step each
in turn. First steps in which shapes are new are left out of the times, and counted: compiling takes as long as many
steps, once. A round in which a further shape came up is left out too, for both, and how many were is in the table.
The losses of both are compared at every step.

    python benchmarks/compiled_step.py --json docs/results/compiled-step.json
    python benchmarks/compiled_step.py --recipes eagle-tiny --tiny          # checks the script, measures nothing

Read next: `train_step.py`, the parts of a step; `trainers/loop/compiled.py`, what is compiled.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.neighbours import beside, times_as_long
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.common.runs import parser_of
from draftsmith.benchmarks.common.unstarted import loop_of
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers.loop.progress import Meter

TINY = {"data.sequence_length": "64", "loop.batch_rows": "2", "loop.micro_rows": "2", "data.limit_rows": "40"}
RECIPES = [f"{name}-tiny" for name in ("distill", "medusa", "hydra", "eagle", "hass", "eagle3", "mtp")]
WAYS = {"plain": "false", "compiled": "true"}


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    rows = [row(recipe, args) for recipe in args.recipes]
    record = assembled(rows, args)
    print(printed(record))
    finish(record, args.json)


class Arm:
    """A recipe's loop with or without the compiler: seconds and losses of its steps, and in which shapes were new."""

    def __init__(self, recipe: str, folder: Path, compile: str, values: dict[str, str]) -> None:
        self.loop = loop_of(recipe, folder, {**values, "loop.compile": compile})
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.graphs: list[int] = []

    def step(self) -> None:
        meter, began = Meter(), time.perf_counter()
        self.loop.train_step(len(self.seconds), meter)
        loss = meter.means(self.loop.accelerator)["loss"]  # read: a device has done the step by then
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(loss)
        self.graphs.append(0 if self.loop.compiled is None else self.loop.compiled.graphs.total())


def row(recipe: str, args: argparse.Namespace) -> dict[str, Cell]:
    """Both ways of a recipe, step by step in turn."""
    with tempfile.TemporaryDirectory() as folder:
        arms = {name: Arm(recipe, Path(folder), way, args.set) for name, way in WAYS.items()}
        for _ in range(args.warm + args.rounds):
            for arm in arms.values():
                arm.step()
    plain, mine = arms.values()
    steady = [at for at in range(args.warm, args.warm + args.rounds) if mine.graphs[at] == mine.graphs[at - 1]]
    if not steady:
        raise SystemExit(f"{recipe}: every round met a new shape; take more --warm")
    without, by_torch = ([arm.seconds[at] for at in steady] for arm in (plain, mine))
    new = [at for at, count in enumerate(mine.graphs) if count > (mine.graphs[at - 1] if at else 0)]
    return {
        "recipe": recipe,
        "time": times_as_long(by_torch, without),
        "plain_s": median(without),
        "compiling_s": sum(mine.seconds[at] for at in new) - len(new) * median(by_torch),
        "graphs": mine.graphs[-1],
        "left_out": args.rounds - len(steady),
        "differ": max(abs(one / other - 1) for one, other in zip(mine.losses, plain.losses, strict=True)),
    }


def assembled(rows: list[dict[str, Cell]], args: argparse.Namespace) -> Record:
    """One row per recipe."""
    heads = {
        "recipe": "`{recipe}`",
        "time of the compiled step over the other": "{time}",
        "a step without": "{plain_s} s",
        "compiling took": "{compiling_s} s",
        "graphs": "{graphs}",
        "rounds with a new shape": "{left_out}",
        "losses differ by at most": "{differ}",
    }
    set_by_hand = "".join(f", `{name}: {value}`" for name, value in args.set.items())
    return record_of(
        args,
        title="A compiled step",
        target=target_weights(str(load_recipe(args.recipes[0], list(args.set.items())).recipe.target.path)),
        setup=f"The recipes as they are shipped{set_by_hand}; {args.threads} thread(s). {args.warm} steps of each way "
        f"before {args.rounds} rounds that are timed, a step of each in turn.{beside(args.threads)}",
        intervals="medians over rounds, with 95 % bootstrap intervals",
        formats={"time": ".2f", "plain_s": ".2f", "compiling_s": ".0f", "differ": ".0e"}
        | dict.fromkeys(("graphs", "left_out"), ".0f"),
        rows=rows,
        tables={"compiled-step": table_of(heads)},
        not_measured=["a GPU"],
    )


def arguments() -> argparse.Namespace:
    parser = parser_of((__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=RECIPES)
    parser.add_argument("--warm", type=int, default=12, help="steps of each before those that are timed")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.set = {"data.limit_rows": "400", "probe.prompts": "1", **(TINY if args.tiny else {}), **dict(args.set)}
    if args.tiny:
        args.warm, args.rounds = 3, 3
    return args


if __name__ == "__main__":
    main()
