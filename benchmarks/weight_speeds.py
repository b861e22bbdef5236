"""How much faster a target decodes with the drafters of `draft_weights.py`, by what their loss weighed.

Takes the runs that `draft_weights.py` has kept, and trains those that are not there. The drafters of a family, of all
arms and seeds, decode in turn with each other and with plain decoding, one prompt at a time; a speed-up is a ratio of
sums of seconds over the same prompts.

    python benchmarks/weight_speeds.py --out runs/draft-weights --seeds 0,1,2 --json weight-speeds.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from draftsmith.benchmarks.common.kept import same_settings
from draftsmith.benchmarks.common.markdown import cell_text, printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, figure, mean_figure, table_of
from draftsmith.benchmarks.common.runs import by_seed
from draftsmith.benchmarks.common.shapes import DEPTH, Family
from draftsmith.benchmarks.draft_weights import CHOSEN, FREE, WHAT, decoding, parser, train
from draftsmith.data.prompts import load_prompts
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.evaluate import evaluate
from draftsmith.eval.measure.requests import make_requests
from draftsmith.launch.recipe.load import load_recipe

HEADS = {"family": "{family}", "trained on with": "{what}"}
HEADS |= {f"speed-up T={at}": f"{{speedup_T{at}}}" for at in (0, 1)}


def main() -> None:
    asked = parser()
    asked.add_argument("--repeats", type=int, default=2)
    args = asked.parse_args()
    same_settings(args.out, vars(args), free=FREE)
    rows = [row for name in args.families for row in speeds(CHOSEN[name], args)]
    record = assembled(rows, args)
    print(printed(record))
    finish(record, args.json)


def speeds(family: Family, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of a family, an arm each."""
    target = load_target(load_recipe(family.recipe).recipe.target.path)
    config = decoding(args).model_copy(update={"temperatures": [0.0, 1.0], "sweep": [], "repeats": args.repeats})
    requests = make_requests(target, load_prompts(config.prompts, limit=config.limit, seed=config.seed), config)
    keys = [(arm, part) for arm in args.arms for part in by_seed(args)]
    arms = [
        Arm(f"{arm}, seed {part.seed}", family.shapes["chain"](train(family, arm, part) / "drafter", target))
        for arm, part in keys
    ]
    measured = evaluate(target, arms, requests, config, own_lengths=True)["rows"]
    for arm in args.arms:
        row: dict[str, Any] = {"family": family.name, "arm": arm, "what": WHAT[arm]}
        for at in (0, 1):
            own = [
                each for each in measured if each["temperature"] == at and each["method"].startswith(f"{arm}, seed")
            ]
            row[f"speedup_T{at}"] = mean_figure([found for each in own if (found := figure(each["speedup"]))])
        print(f"{family.name}, {arm}: {cell_text(row['speedup_T0'], '.2f')}", flush=True)
        yield row


def assembled(rows: list[dict[str, Any]], args: argparse.Namespace) -> Record:
    return record_of(
        args,
        title="Speed by what the loss weighed",
        target=target_weights(load_recipe("eagle3-tiny").recipe.target.path),
        setup=f"The drafters of `draft_weights.py`; {args.limit} held-out prompts of {args.prompts}, "
        f"{args.max_new_tokens} new tokens, batch 1, chains of {DEPTH}, the drafters of a family and plain decoding "
        f"in turn, {'once' if args.repeats == 1 else f'{args.repeats} times'} each.",
        intervals="95 % bootstrap intervals over prompts; over seeds the means of their ends",
        audit={"verdict": "of `draft_weights.py`, the same drafters"},
        formats={"speedup_T0": ".2f", "speedup_T1": ".2f"},
        rows=rows,
        tables={"weight-speeds": table_of(HEADS)},
    )


if __name__ == "__main__":
    main()
