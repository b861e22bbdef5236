"""The runs of `../smollm2.py` by their folders, and the words of the command line that make, tune and compare them.

Read next: `record.py`, what is said of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

from draftsmith.benchmarks.common.function_questions import digest
from draftsmith.decoding.devices import multiplies_bf16
from draftsmith.drafters.families import wrapping


def half() -> dict[str, object]:
    """In which precision it is trained: bf16 where the processor multiplies it."""
    return {"loop.precision": "bf16", "features.precision": "bf16"} if multiplies_bf16() else {}


def flags(values: Mapping[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def decoding(args: argparse.Namespace) -> list[str]:
    return flags({"eval.max_new_tokens": args.new_tokens, "target.dtype": args.dtype})


def answering(args: argparse.Namespace, out: Path, name: str, limit: int | None = None) -> list[str]:
    words = ["generate", "--source", str(args.out / "prompts" / f"{name}.jsonl"), "--target", str(args.out / "target")]
    words += ["--out", str(out), "--max-new-tokens", str(args.answer_tokens), "--target.dtype", args.dtype]
    return [*words, *args.answering, *([] if limit is None else ["--limit", str(limit)])]


def training(
    family: str, args: argparse.Namespace, rows: Path, run: Path, steps: int, more: Mapping[str, object] | None = None
) -> list[str]:
    every = max(steps // 10, 5)
    values: dict[str, object] = {
        "target.path": args.out / "target",
        "target.dtype": args.dtype,
        "data.source": rows,
        "data.sequence_length": args.row_tokens,
        "loop.steps": steps,
        "loop.batch_rows": args.batch_rows,
        "loop.micro_rows": 1,
        "loop.log_every": max(steps // 40, 1),
        "loop.validate_every": steps,
        "loop.validate_rows": 8,
        "optimizer.warmup_steps": min(max(steps // 20, 5), 100),
        "checkpoint.every_steps": every,
        # an epoch is read many times, and by every seed: its states are computed once
        "features.source": "cache",
        "features.folder": states_of(run.parent, family),
        "probe.every_steps": -(-steps // args.probes) if args.probes else "",
        # probes choose which weights are exported: not on the prompts that are measured
        "eval.prompts": args.out / "prompts" / "tune.jsonl",
    }
    values = values | half() | dict(more or {})
    return ["train", f"{family}-small", "--out", str(run), *flags(values), *args.training]


def states_of(out: Path, family: str) -> Path:
    """Where the states that a family reads are kept, of the rows that its runs have in common."""
    return out / "states" / family


def tuning(args: argparse.Namespace, run: Path, *, first: bool) -> list[str]:
    words = ["tune", str(run), "--prompts", str(args.out / "prompts" / "tune.jsonl"), "--limit", str(args.limit)]
    _, alone = beside(args)
    words += ["--method", ",".join(["trained", *alone] if first else ["trained"]), "--chains", "--no-surfaces"]
    return [*words, *decoding(args)]


def runs_of(args: argparse.Namespace) -> dict[str, tuple[str, int]]:
    """The training runs by the names of their folders: a family and a seed each, in the order of the table."""
    return {
        f"{family}-seed-{seed}" if at else family: (family, seed)
        for family in args.families
        for at, seed in enumerate(args.seeds)
    }


def beside(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Methods that draft around each drafter, and those that draft alone."""
    around = [name for name in args.beside if name in wrapping()]
    return around, [name for name in args.beside if name not in around]


def compared(args: argparse.Namespace) -> Path:
    """The folder of the comparison of these runs."""
    seeds = ["seeds", *map(str, args.seeds)] if len(args.seeds) > 1 else []
    return Path(args.out) / "-".join(["compare", *args.families, *seeds])


def elsewhere(args: argparse.Namespace) -> Path:
    """The folder of the comparison on prompts of other kinds, of the first seed of each family."""
    return Path(args.out) / "-".join(["elsewhere", *args.families, digest(args.elsewhere)[:8]])


def comparing(args: argparse.Namespace) -> list[str]:
    own = flags({"prompts": args.out / "prompts" / "measure.jsonl", "eval.temperatures": "[0, 1]"})
    return [*_comparing(args, compared(args), runs_of(args)), *own]


def comparing_elsewhere(args: argparse.Namespace) -> list[str]:
    others = flags({"prompts": args.elsewhere, "eval.temperatures": 0})
    return [*_comparing(args, elsewhere(args), args.families), *others]


def _comparing(args: argparse.Namespace, out: Path, runs: Iterable[str]) -> list[str]:
    words = ["compare", str(args.out / "target"), "--out", str(out)]
    words += ["--drafters", *(str(args.out / name) for name in runs)]
    if args.beside:
        words += ["--method", ",".join(args.beside)]
    if beside(args)[1]:
        words += ["--tuned", str(args.out / args.families[0] / "eval" / "tune.json")]
    return [*words, *flags({"eval.limit": args.limit}), *decoding(args), *args.audit]
