"""Tau against training: each family trained for 100, 200, 400, ... steps, every length a run of its own.

A point is a whole run with the schedule of its own length, not a moment of a longer one, whose learning rate would
not have come down yet. Chains draft for the same held-out prompts as in `families.py`, and each is audited. The time
of training is steps times tokens over the run's own tokens a second: rough beside other jobs.

    python benchmarks/curves.py --out runs/curves
    python benchmarks/curves.py --out runs/curves --families EAGLE-1,DSpark --lengths 100,200,400
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import at_temperatures, audited, mean, n_alpha
from draftsmith.benchmarks.common.kept import file_name, same_settings
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.benchmarks.common.runs import add_audit, add_decoding, by_seed, kept, numbers, parser_of, seconds_of
from draftsmith.benchmarks.common.shapes import FAMILIES, Family, with_shapes
from draftsmith.benchmarks.families import eval_config, prompts_of, target_of, train
from draftsmith.eval.measure.requests import first_turns
from draftsmith.launch.recipe.load import load_recipe

SHOWN = "EAGLE-1,EAGLE-3,P-EAGLE,DFlash,DSpark"


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("families", "lengths", "seeds", "json"))
    chosen = [with_shapes(each, ["chain"]) for each in FAMILIES if each.name in args.families.split(",")]
    parts = by_seed(args)
    points = {
        (family.name, steps): [
            kept(measured_file(family, steps, part), partial(measure, family, steps, part)) for part in parts
        ]
        for family in chosen
        for steps in args.lengths
    }
    record = assembled(points, chosen, args)
    print(printed(record))
    finish(record, args.json)


def measured_file(family: Family, steps: int, args: argparse.Namespace) -> Path:
    """Where the measurement of one run is kept."""
    path: Path = args.out / f"{file_name(family.name)}-{steps}.json"
    return path


def measure(family: Family, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Sums of the chain at every temperature, its audit, and how long training took."""
    run = train(family, args, steps)
    config, target = eval_config(args), target_of(run)
    drafter = family.shapes["chain"](run / "drafter", target)
    requests = prompts_of(target, config)
    report = audited(target, drafter, first_turns(requests), args)
    if report.failures:
        raise SystemExit(f"{family.name}, {steps} steps: the audit failed: {'; '.join(report.failures)}")
    return {
        "sums": at_temperatures(target, drafter, [each.ids for each in requests], config),
        "audit": [report.verdict, report.rosenblatt.detectable],
        "seconds": seconds_of(run),
        "run": str(run),
    }


# ---- the record -------------------------------------------------------------------------------


def assembled(
    points: dict[tuple[str, int], list[dict[str, Any]]], families: Sequence[Family], args: argparse.Namespace
) -> Record:
    """A row per family and temperature: tau at every length; and a row per family with the seconds."""
    temperatures = [f"{at:g}" for at in eval_config(args).temperatures]
    drafters = {
        f"{name}, {steps} steps, seed {seed}": Path(each["run"]) / "drafter"
        for (name, steps), of_seeds in points.items()
        for seed, each in zip(args.seeds, of_seeds, strict=True)
    }
    heads = {f"{steps} steps": f"{{tau_{steps}}}" for steps in args.lengths}
    firsts = {f"{steps} steps": f"{{n_alpha_{steps}}}" for steps in args.lengths}
    spent = {f"{steps} steps": f"{{seconds_{steps}}} s" for steps in args.lengths}
    tables = {
        f"tau-T{at}": table_of({"family": "{family}", **heads, "verdict": "{verdict} (sees {sees})"}, where={"T": at})
        for at in temperatures
    }
    tables |= {f"first-T{at}": table_of({"family": "{family}", **firsts}, where={"T": at}) for at in temperatures}
    tables["seconds"] = table_of({"family": "{family}", **spent}, where={"T": temperatures[0]})
    return record_of(
        args,
        title="Tau against training steps",
        target=target_weights(load_recipe(families[0].recipe, args.set).recipe.target.path),
        drafters=drafter_weights(drafters),
        setup=f"every length is a run of its own, {args.batch_rows} rows a step; {args.limit} prompts of "
        f"{args.prompts}, {args.max_new_tokens} new tokens, fp32, a chain of 4",
        intervals="95 % bootstrap intervals over prompts",
        audit={
            "verdict": "of each row, at every length",
            "sees": "the smallest total variation seen stands behind it",
        },
        formats={"sees": ".3f"}
        | {f"tau_{steps}": ".2f" for steps in args.lengths}
        | {f"n_alpha_{steps}": ".2f" for steps in args.lengths}
        | {f"seconds_{steps}": ".0f" for steps in args.lengths},
        rows=[row_of(family.name, at, points, args.lengths) for at in temperatures for family in families],
        tables=tables,
    )


def row_of(
    name: str, temperature: str, points: dict[tuple[str, int], list[dict[str, Any]]], lengths: Sequence[int]
) -> dict[str, Any]:
    """A family's cells at a temperature, a length a column."""
    row: dict[str, Any] = {"family": name, "T": temperature}
    of_lengths = {steps: points[name, steps] for steps in lengths}
    for steps, of_seeds in of_lengths.items():
        sums = [each["sums"][temperature] for each in of_seeds]
        row[f"tau_{steps}"] = mean(sums, "tau")
        row[f"n_alpha_{steps}"] = n_alpha(sums)
        row[f"seconds_{steps}"] = sum(each["seconds"] for each in of_seeds) / len(of_seeds)
    audits = [each["audit"] for of_seeds in of_lengths.values() for each in of_seeds]
    return row | {"verdict": ", ".join(sorted({verdict for verdict, _ in audits})), "sees": max(n for _, n in audits)}


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, out="runs/curves")
    parser.add_argument("--families", default=SHOWN)
    parser.add_argument("--lengths", type=numbers, default=[100, 200, 400, 800, 1600], help="steps of each run")
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.set_defaults(repeats=1)
    add_decoding(parser, limit=24)
    add_audit(parser, tokens=1000, sequences=20_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
