"""How far rounding moves a target: KL, the likeliest tokens, and the hidden states that drafters learn from.

The comparison that `draftsmith eval` makes where `target.quantization` is set, once for every way of rounding.

    python benchmarks/rounded_states.py --json docs/results/rounded-states.json
    python benchmarks/rounded_states.py --rows 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Cell, Record, figure, table_of
from draftsmith.data.rows.prepare import prepare
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.eval.measure.drift import measure_drift
from draftsmith.launch.recipe.load import load_recipe

ROUNDED = ("int8", "int4")


def main() -> None:
    args = arguments()
    original = load_target(args.target)
    record = assembled([row(original, how, args) for how in ROUNDED], args)
    print(printed(record))
    finish(record, args.json)


def row(original: Backbone, how: str, args: argparse.Namespace) -> dict[str, Cell]:
    """One way of rounding against the target as it is."""
    data = load_recipe("eagle-tiny", [("data.limit_rows", "400")]).recipe.data
    rows = prepare(data, original.tokenizer, out=None).validation
    rounded = load_target(args.target, quantization=how)
    drift = measure_drift(original, rounded, rows, count=args.rows, change="rounded")
    states = {f"state_{number}": 100 * far for number, far in drift.states.items()}
    same = [None if part is None else 100 * part for part in drift.same.to_list()]
    return {"rounded": how, "kl": figure(drift.kl.to_list()), "same": figure(same), "tokens": drift.tokens, **states}


def assembled(rows: list[dict[str, Cell]], args: argparse.Namespace) -> Record:
    """All figures as a record."""
    states = [name for name in rows[0] if name.startswith("state_")]
    heads = {"`target.quantization`": "`{rounded}`", "KL, nats a token": "{kl}", "same likeliest token": "{same} %"}
    heads |= {f"state {name.partition('_')[2]}": f"{{{name}}} %" for name in states}
    return record_of(
        args,
        title="Hidden states of rounded targets",
        target=target_weights(args.target),
        setup=(
            f"{args.rows} held-out rows of stdlib; each against the target as it is. States by their number, the last "
            "one behind the norm: distance as a share of the length, mean over tokens."
        ),
        intervals="95 % bootstrap intervals over rows",
        formats={"kl": ".4f", "same": ".1f"} | dict.fromkeys(states, ".2f"),
        rows=rows,
        tables={"rounded-states": table_of(heads)},
        not_measured=["FP8 checkpoints, AWQ, GPTQ and bitsandbytes; a GPU's kernels"],
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
