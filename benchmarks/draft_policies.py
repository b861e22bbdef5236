"""How a chain should be drawn above temperature 0: as it is, by its likeliest tokens, or colder by depth.

Drafts that do not see each other (DFlash, P-EAGLE, PARD) are drawn from marginals, and two independent draws often
do not go together; the likeliest tokens do, but a point mass is accepted with the target's probability of it alone. A
temperature per depth stands between. What drafts one token behind the other (EAGLE, DSpark's Markov walk) is
drawn from what it knows of the drafts in front. Every way is audited; tau and acceptance by depth, no seconds.

    python benchmarks/draft_policies.py DFlash=runs/dflash/drafter DSpark=runs/dspark/drafter
    python benchmarks/draft_policies.py PARD=runs/pard-tiny/drafter P-EAGLE=runs/peagle-tiny/drafter
    python benchmarks/draft_policies.py DFlash=runs/dflash/drafter --temperatures 0.5,1 --limit 12
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import audited, decoded, mean, n_alpha
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.benchmarks.common.runs import add_audit, add_decoding, parser_of
from draftsmith.data.prompts import load_prompts
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.requests import first_turns, make_requests

WAYS: dict[str, dict[str, Any]] = {
    "drawn": {},
    "the likeliest (argmax)": {"policy": "argmax"},
    "the first drawn, then the likeliest": {"temperature_factors": [1, 0]},
    "0.3 of the temperature everywhere": {"temperature_factors": [0.3]},
    "the first drawn, then 0.3 of the temperature": {"temperature_factors": [1, 0.3]},
}
DEPTH = 4


def main() -> None:
    args = arguments()
    target = load_target(args.target)
    config = EvalConfig(prompts=args.prompts, limit=args.limit, prompt_tokens=args.prompt_tokens)
    requests = make_requests(target, load_prompts(config.prompts, limit=config.limit, seed=config.seed), config)
    prompts = first_turns(requests)
    rows = [
        measured(target, (name, folder), way, temperature, prompts, args)
        for temperature in args.temperatures
        for name, folder in args.drafters.items()
        for way in WAYS
    ]
    record = assembled(rows, args)
    print(printed(record))
    finish(record, args.json)


def measured(
    target: Backbone,
    named: tuple[str, Path],
    way: str,
    temperature: float,
    prompts: Sequence[list[int]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """A drafter's cells for one way at one temperature."""
    name, folder = named
    drafter = load_drafter(folder, target, draft_length=DEPTH, config=DrafterConfig(**WAYS[way]))
    report = audited(target, drafter, prompts, args, temperature=temperature)
    if report.failures:
        raise SystemExit(f"{name}, {way}: the audit failed: {'; '.join(report.failures)}")
    sums = decoded(target, drafter, prompts, temperature, max_new_tokens=args.max_new_tokens, draws=args.draws)
    return {
        "family": name,
        "way": way,
        "T": temperature,
        "tau": mean([sums], "tau"),
        "n_alpha": n_alpha([sums]),
        "verdict": report.verdict,
        "sees": report.rosenblatt.detectable,
    }


def assembled(rows: list[dict[str, Any]], args: argparse.Namespace) -> Record:
    heads = {"family": "{family}", "drafts are": "{way}", "tau": "{tau}", "n-alpha": "{n_alpha}"}
    return record_of(
        args,
        title="How a chain is drawn above temperature 0",
        needs=["the drafters, each trained by its recipe"],
        target=target_weights(args.target),
        drafters=drafter_weights(args.drafters),
        setup=f"A chain of {DEPTH}; {args.limit} prompts of {args.prompts}, {args.draws} draws of each, "
        f"{args.max_new_tokens} new tokens, fp32.",
        intervals="95 % bootstrap intervals over prompts",
        audit={"verdict": "of each row", "sees": "the smallest total variation seen stands behind it"},
        formats={"tau": ".2f", "n_alpha": ".2f", "sees": ".3f"},
        rows=rows,
        tables={
            f"T{temperature:g}": table_of({**heads, "verdict": "{verdict} (sees {sees})"}, where={"T": temperature})
            for temperature in args.temperatures
        },
    )


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("drafters", nargs="+", type=named, metavar="NAME=FOLDER", help="trained for the target")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--temperatures", type=decimals, default=[1.0], metavar="0.5,1")
    parser.add_argument("--draws", type=int, default=4, help="of each prompt, with other random numbers")
    add_decoding(parser, limit=24)
    add_audit(parser, tokens=1_000, sequences=20_000)
    args = parser.parse_args()
    args.drafters = dict(args.drafters)
    return args


def named(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    return name, Path(folder)


def decimals(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
