"""What a step costs by what its loss weighs: the arms of `draft_weights.py`, beside the recipes' own losses.

Every loop is made as `draftsmith train` makes it, with real rows; then the loops of a family take a step each in turn,
so that all meet the same machine. A cost is the ratio of two sums of seconds over the same rounds, with a 95 %
bootstrap interval over rounds. Drafters of a family have one network whatever they learnt by, so what a step costs is
all that an arm costs.

    python benchmarks/weight_costs.py
    python benchmarks/weight_costs.py --families EAGLE-3 --rounds 30 --json weight-costs.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from draftsmith.benchmarks.common.markdown import cell_text, printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, figure, table_of
from draftsmith.benchmarks.common.runs import names_of, parser_of
from draftsmith.benchmarks.common.shapes import Family
from draftsmith.benchmarks.common.unstarted import loop_of
from draftsmith.benchmarks.draft_weights import ARMS, BASE, CHOSEN, LONGER, WHAT, values_of
from draftsmith.eval.measure.metrics import ratio
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers.loop.progress import Meter

CHEAP = tuple(name for name in ARMS if name not in LONGER)
WARM_UP = 2
"""Steps of every loop in front of the first that counts, in which kernels and caches are made."""
HEADS = {"family": "{family}", "trained on with": "{arm}", "a step, times the recipe's own": "{cost}"}


def main() -> None:
    args = arguments()
    rows = [row for name in args.families for row in costs(CHOSEN[name], args)]
    record = assembled(rows, args)
    print(printed(record))
    finish(record, args.json)


def costs(family: Family, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a family, the recipe's own loss among them."""
    with tempfile.TemporaryDirectory() as folder:
        loops = {arm: loop_of(family.recipe, Path(folder), loop_values(family, arm, args)) for arm in args.arms}
        seconds: dict[str, list[float]] = {arm: [] for arm in args.arms}
        for at in range(WARM_UP + args.rounds):
            for arm, loop in loops.items():
                began = time.perf_counter()
                loop.train_step(at, Meter())
                seconds[arm].append(time.perf_counter() - began)
    base_S = np.array(seconds[BASE][WARM_UP:])
    found = []
    for arm in args.arms:
        cost = None if arm == BASE else figure(ratio(np.array(seconds[arm][WARM_UP:]), base_S).to_list())
        found.append({"family": family.name, "arm": WHAT[arm], "cost": cost})
        print(f"{family.name}, {WHAT[arm]}: {'-' if cost is None else cell_text(cost, '.2f')}", flush=True)
    return found


def loop_values(family: Family, arm: str, args: argparse.Namespace) -> dict[str, str]:
    """The settings of an arm's loop; what `draft_weights.py` trains with."""
    rows = {"loop.batch_rows": args.batch_rows, "loop.micro_rows": args.batch_rows}
    return {name: str(value) for name, value in {**dict(args.set), **rows, **values_of(family, arm)}.items()}


def assembled(rows: list[dict[str, Any]], args: argparse.Namespace) -> Record:
    return record_of(
        args,
        title="What weights of drafts cost",
        target=target_weights(load_recipe("eagle3-tiny").recipe.target.path),
        setup=f"{args.rounds} steps of {args.batch_rows} rows each, the loops of a family by turns.",
        intervals="95 % bootstrap intervals over rounds",
        formats={"cost": ".2f"},
        rows=rows,
        tables={"weight-costs": table_of(HEADS)},
    )


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--families", type=names_of(CHOSEN), default=list(CHOSEN), help="with commas between")
    parser.add_argument("--arms", type=names_of(ARMS), default=list(CHEAP), help="with commas between")
    parser.add_argument("--rounds", type=int, default=20, help="steps of every loop that are timed")
    parser.add_argument("--batch-rows", type=int, default=4)
    args = parser.parse_args()
    if BASE not in args.arms:
        parser.error(f"--arms has to hold {BASE!r}, which the others are compared with")
    return args


if __name__ == "__main__":
    main()
