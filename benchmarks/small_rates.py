"""Optimisers, learning rates and sizes of the `-small` recipes, by short runs on `smollm2.py`'s answers.

Each run is the recipe with these flags changed, as many steps long as all others, on the same rows in the same order;
what is kept is acceptance on held-out rows at its end and a probe's tau. Other sizes are tried with the recipe's own
optimiser. What is best in few steps need not be in many: with `--longer` a family's best and its recipe's are run for
more. Runs that are finished stay, so the same command goes on where it was stopped. Other flags are those of
`smollm2.py`, whose folder this reads: read it next.

    python benchmarks/small_rates.py --out smollm2 --families eagle3 --rates "adamw 1e-3" "muon 1e-2" --steps 60 \\
        --longer 300 --sizes "eagle3 --eagle3.vocabulary 4096" --json docs/results/small-rates.json
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from draftsmith.benchmarks import smollm2
from draftsmith.benchmarks.common.kept import file_name, is_finished
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Audit, table_of
from draftsmith.benchmarks.common.stages import finished
from draftsmith.benchmarks.public_model.verbs import states_of, training
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.storage import json_lines

HEADS = {
    "recipe": "{recipe}",
    "changed": "{changed}",
    "steps": "{steps}",
    "optimizer": "{optimizer}",
    "learning rate": "{rate}",
    "held-out alpha": "{alpha}",
    "probe's tau": "{tau}",
}
FORMATS = {"rate": "g", "alpha": ".3f", "tau": ".2f"}
PROBE = {"probe.prompts": 16, "probe.every_steps": ""}
Rate = tuple[str, float]


def main() -> None:
    args = arguments()
    rows = [one(args, family, "", rate, args.steps) for family, rate in product(args.families, args.rates)]
    rows += [one(args, family, size, None, args.steps) for family, size in args.sizes]
    if args.longer:
        rows += [one(args, family, "", rate, args.longer) for family in args.families for rate in chosen(rows, family)]
    record = record_of(
        argparse.Namespace(seeds=[0]),
        title="Optimisers and learning rates of the -small recipes",
        target=target_weights(str(args.out / "target")),
        drafters=[],
        setup=f"Steps of {args.row_tokens:,} tokens of the target's own answers, each run with its whole schedule; "
        f"alpha over held-out rows, tau of {PROBE['probe.prompts']} held-out prompts.",
        intervals="none: one seed",
        tells_apart="what another seed changes, which was not measured here",
        audit=Audit(verdict="not audited", sees="short runs are compared, no drafter is rated"),
        formats=FORMATS,
        rows=rows,
        tables={"small-rates": table_of(HEADS)},
    )
    print(printed(record))
    finish(record, args.json)


def one(args: argparse.Namespace, family: str, size: str, rate: Rate | None, steps: int) -> dict[str, Any]:
    """A row: a run of a family with an optimiser and its rate, None: the recipe's; trained where that is not done."""
    name, lr = rate or own_rate(family)
    run = args.out / "rates" / file_name(f"{family} {size} {name} {lr:g} {steps}")
    if not is_finished(run):
        answers = args.out / "answers" / "answers.jsonl"
        changed = {"optimizer.name": name, "optimizer.lr": lr, "features.folder": states_of(args.out, family)}
        words = training(family, args, answers, run, steps, changed | PROBE)
        if code := finished(["-m", "draftsmith.launch.cli", *words, *shlex.split(size)]):
            raise SystemExit(code)
    last = {line["kind"]: line for line in json_lines(run / "metrics.jsonl")}
    # heads are judged by the tokens that they get right, and have no alpha on rows
    cells = {"alpha": last["validation"].get("validation_alpha"), "tau": last["probe"]["tau"]}
    about = {"recipe": f"{family}-small", "changed": size or "-", "steps": steps, "optimizer": name, "rate": lr}
    return about | cells


def own_rate(family: str) -> Rate:
    """The optimiser of a family's recipe and its rate."""
    given = load_recipe(f"{family}-small").recipe.optimizer
    return given.name, given.lr


def chosen(rows: Sequence[Mapping[str, Any]], family: str) -> list[Rate]:
    """What is worth more steps: the recipe's own, and what was best in few where that is another one."""
    tried = [row for row in rows if row["recipe"] == f"{family}-small" and row["changed"] == "-"]
    best = max(tried, key=lambda row: row["tau"] if row["alpha"] is None else row["alpha"])
    return list(dict.fromkeys([own_rate(family), (best["optimizer"], best["rate"])]))


def rate_in(text: str) -> Rate:
    """'adamw 1e-3' -> an optimiser and its rate."""
    name, rate = text.split()
    return name, float(rate)


def size_in(text: str) -> tuple[str, str]:
    """'eagle3 --eagle3.vocabulary 4096' -> a family and flags of `train`."""
    family, flags = text.split(maxsplit=1)
    return family, flags


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("smollm2"), help="the folder of smollm2.py, with its target and answers")
    add("--families", nargs="+", choices=smollm2.FAMILIES, default=["eagle3"], metavar="FAMILY")
    add("--rates", nargs="+", type=rate_in, default=[None], help="'adamw 1e-3' and so on; default: the recipe's")
    add("--sizes", nargs="+", type=size_in, default=[], help="'eagle3 --eagle3.vocabulary 4096' and so on")
    add("--steps", type=int, default=100)
    add("--longer", type=int, metavar="STEPS", help="run each family's best and its recipe's for so many, too")
    add("--json", type=Path)
    ours, theirs = parser.parse_known_args()
    return argparse.Namespace(**vars(smollm2.arguments(["--out", str(ours.out), *theirs])) | vars(ours))


if __name__ == "__main__":
    main()
