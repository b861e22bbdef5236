"""What writing rows while training costs, as a share of the time of the steps, on this machine.

A recipe is trained for a few steps with each writer, writing anew at every step or for several;
the share is the run's own record (`rollout_share` in metrics.jsonl), the first steps left out.

    python benchmarks/on_policy_cost.py
    python benchmarks/on_policy_cost.py --share 1.0 --by student,mixed --every 1,4
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path
from statistics import median

import torch
from draftsmith.eval.measure.environment import environment
from draftsmith.launch.train import train

WARM = 2  # records left out: the first steps make kernels and KV caches


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.WARNING)
    place = environment()
    print(
        f"{place['processor']}, {place['threads']} threads, torch {torch.__version__}; "
        f"{args.recipe}, {args.share:.0%} of the rows, medians over {args.steps} steps"
    )
    print("| written by | every | share of the time | tokens/s |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for by in args.by:
            for every in args.every:
                share, speed = cost(Path(folder) / f"{by}-{every}", by, every, args)
                print(f"| {by} | {every} | {share:.1%} | {speed:,.0f} |", flush=True)


def cost(out: Path, by: str, every: int, args: argparse.Namespace) -> tuple[float, float]:
    """Share of the time and tokens per second, medians over stretches of `every` steps."""
    stretches = max(3, args.steps // every)
    own = {name.replace(".", "__"): value for name, value in args.set}
    train(
        args.recipe,
        out=out,
        rollouts__share=args.share,
        rollouts__by=by,
        rollouts__every_steps=every,
        loop__log_every=every,
        loop__steps=(WARM + stretches) * every,
        loop__validate_every=10**6,
        loop__validate_rows=1,
        probe__every_steps=None,
        probe__prompts=1,
        probe__max_new_tokens=2,
        checkpoint__every_steps=10**6,
        **own,
    )
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if line["kind"] == "train"][WARM:]
    return (median(line["rollout_share"] for line in found), median(line["tokens_per_second"] for line in found))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="distill-on-policy-tiny")
    parser.add_argument("--share", type=float, default=0.5)
    names = ["student", "target", "mixed"]
    parser.add_argument("--by", type=lambda word: word.split(","), default=names)
    parser.add_argument(
        "--every",
        type=lambda word: list(map(int, word.split(","))),
        default=[1, 4],
        help="steps that train on the same rows",
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--set",
        type=lambda word: tuple(word.split("=", 1)),
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="a value for every run's recipe",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
