"""What writing rows while training costs, as a share of the time of the steps, on this machine.

A recipe is trained for a few steps with each writer, writing anew at every step or for several;
the share is the run's own record (`rollout_share` in metrics.jsonl), the first steps left out.

    python benchmarks/on_policy_cost.py
    python benchmarks/on_policy_cost.py --share 1.0 --by student,mixed --every 1,4
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.benchmarks.common.runs import QUIET, numbers, parser_of, trained
from draftsmith.launch.recipe.load import load_recipe

WARM = 2  # records left out: the first steps make kernels and KV caches


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        rows = [cost(Path(folder) / f"{by}-{every}", by, every, args) for by in args.by for every in args.every]
    record = assembled(rows, args)
    print(printed(record))
    finish(record, args.json)


def cost(out: Path, by: str, every: int, args: argparse.Namespace) -> dict[str, Any]:
    """Share of the time and tokens per second, medians over stretches of `every` steps."""
    stretches = max(3, args.steps // every)
    own = {
        "rollouts.share": args.share,
        "rollouts.by": by,
        "rollouts.every_steps": every,
        "loop.log_every": every,
        "loop.steps": (WARM + stretches) * every,
        "loop.validate_rows": 1,
        "probe.prompts": 1,
        "probe.max_new_tokens": 8,
        "checkpoint.every_steps": 10**6,
    }
    run = trained(args.recipe, out, QUIET | own | dict(args.set))
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    records = [line for line in lines if line["kind"] == "train"][WARM:]
    names = {"share": "rollout_share", "tokens_per_second": "tokens_per_second"}
    return {"by": by, "every": every, **{name: median(line[key] for line in records) for name, key in names.items()}}


def assembled(rows: list[dict[str, Any]], args: argparse.Namespace) -> Record:
    """One row per writer and number of steps."""
    heads = {
        "written by": "{by}",
        "every": "{every}",
        "share of the time": "{share}",
        "tokens/s": "{tokens_per_second}",
    }
    return record_of(
        argparse.Namespace(),  # what is learned is thrown away: no training seed
        title="What writing rows while training costs",
        target=target_weights(str(load_recipe(args.recipe, args.set).recipe.target.path)),
        setup=f"`{args.recipe}`, {args.share:.0%} of the rows written; medians over {args.steps} steps.",
        formats={"share": ".1%", "tokens_per_second": ",.0f"},
        rows=rows,
        tables={"on-policy-cost": table_of(heads)},
    )


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="distill-on-policy-tiny")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--by", type=lambda text: text.split(","), default=["student", "target", "mixed"])
    parser.add_argument("--every", type=numbers, default=[1, 4], help="steps that train on the same rows")
    parser.add_argument("--steps", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
