"""How long `../smollm2.py` will take from here, said before it begins: of paces that trials found on this machine.

Read next: `verbs.py`, what is run for so long.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from draftsmith.benchmarks.common.stages import minutes
from draftsmith.benchmarks.public_model.verbs import beside, runs_of
from draftsmith.benchmarks.target_dtypes import plain
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.eval.config import AuditConfig, EvalConfig
from draftsmith.storage import json_lines

TUNED, MEASURED, AUDITED = 4.2, 0.7, 0.6
"""Seconds for each second in which plain decoding writes as many tokens: a run's tuning, an arm's measurement, and its
audit, of the tokens that are sampled. Found with the runs on the page."""
COUNTED, BY_COPIES = 45.0, 340.0
"""Seconds in which an audit counts sequences over tables: of a drafter, and of methods that keep an index on the host.
They know no target; once for all arms of a kind."""
TOKENS = 64
"""So many are decoded to find out how long one takes."""


def token_seconds(args: argparse.Namespace) -> float:
    """Of one token of plain decoding here, one prompt at a time."""
    target = load_target(str(args.out / "target"), dtype=args.dtype)
    ids = list(range(TOKENS))
    plain(target, ids, 4)  # warms up
    start = time.perf_counter()
    plain(target, ids, TOKENS)
    return (time.perf_counter() - start) / TOKENS


def paces_of(args: argparse.Namespace, family: str) -> tuple[float, float]:
    """Tokens per second of a family's trial, first with the target's own passes, then behind states that are kept."""
    lines = json_lines(args.out / "trial" / family / "metrics.jsonl")
    paces = [line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    return median(paces[: len(paces) // 2]), median(paces[len(paces) // 2 :])


def passes_seconds(plan: Mapping[str, Any], args: argparse.Namespace) -> float:
    """How long the target's passes over the answers will take, once a family."""
    read = args.answers * args.answer_tokens
    seconds = 0.0
    for family in args.families:
        first, later = paces_of(args, family)
        seconds += max(min(read, plan[family] * args.batch_rows * args.row_tokens) * (1 / first - 1 / later), 0.0)
    return seconds


def measuring_seconds(plan: Mapping[str, Any], args: argparse.Namespace) -> float:
    """How long tuning, the audits and the measurements will take."""
    runs = len(runs_of(args))
    # methods that draft alone are in the first run's race
    seconds = float(plan["token"]) * TUNED * runs * args.limit * args.new_tokens
    seconds += _comparing_seconds(plan, args, runs, parts=2)  # at two temperatures
    if args.elsewhere:
        seconds += _comparing_seconds(plan, args, len(args.families), parts=len(args.elsewhere.split(",")))
    return seconds


def _comparing_seconds(plan: Mapping[str, Any], args: argparse.Namespace, drafters: int, *, parts: int) -> float:
    """Of one comparison; `parts`: temperatures and sets of prompts."""
    around, alone = beside(args)
    arms = drafters * (1 + len(around)) + len(alone)
    repeats = given(args, "--eval.repeats", EvalConfig().repeats)
    # plain decoding is measured beside the arms
    measured = MEASURED * repeats * (arms + 1) * parts * args.limit * args.new_tokens
    audited = AUDITED * arms * given(args, "--audit.tokens", AuditConfig().tokens)
    return float(plan["token"]) * (measured + audited) + COUNTED * len(args.families) + BY_COPIES * len(args.beside)


def given(args: argparse.Namespace, flag: str, default: int) -> int:
    """The value of a flag of `compare`."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(flag, dest="value", type=int, default=default)
    value: int = parser.parse_known_args(args.audit)[0].value
    return value


def told(plan: Mapping[str, Any], args: argparse.Namespace) -> str:
    """How long it will take from here, before it begins."""
    families = ", ".join(f"{family} {plan[family]:,} steps" for family in args.families)
    runs = len(runs_of(args))
    passes, measuring = passes_seconds(plan, args), measuring_seconds(plan, args)
    total = plan["answers"] + 60 * args.minutes * runs + passes + measuring
    return (
        f"\n{args.answers:,} answers take about {minutes(plan['answers'])} here, and each of {runs} "
        f"drafters {args.minutes:g} min of training ({families}), with the target's passes over the answers, "
        f"once a family, of {minutes(passes)} together, and tuning, audits and measurements of {args.limit} prompts "
        f"{minutes(measuring)}: about {minutes(total)}. Stop it when you like: the same command goes on."
    )
