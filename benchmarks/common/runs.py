"""What all scripts that train share: their arguments, training once, one folder a training seed.

A run that is finished is not trained again, and what was measured is kept in a file and not measured
again, so that a call that was cut goes on where it was. Read next: `kept.py`, `acceptance.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.kept import file_name, is_finished
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.storage import write_text

# of every run: nothing but training, whose steps the probes and held-out losses do not change
QUIET = {"loop.validate_every": 100_000, "loop.validate_rows": 4, "probe.every_steps": "", "probe.prompts": 2}
# an untrained drafter is one after a step that changes nothing
UNTRAINED = {"loop.steps": 1, "optimizer.lr": 1e-12, "optimizer.warmup_steps": 0}


def trained(recipe: str, folder: Path, values: Mapping[str, Any]) -> Path:
    """The folder of a run, trained now if it is not finished, by a process of its own.

    Raises:
        SystemExit: training failed; the message names the log beside the folder.
    """
    if is_finished(folder):
        return folder
    log = folder.with_name(f"{folder.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    settings = [part for key, value in values.items() for part in (f"--{key}", as_setting(value))]
    command = [sys.executable, "-m", "draftsmith.launch.train", recipe, "--out", str(folder), *settings]
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{folder.name}: training failed, see {log}")
    return folder


def seconds_of(run: Path) -> float:
    """What the steps of a run took, by the median of its reported speeds."""
    recipe = load_recipe(str(run / "run.yaml")).recipe
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    speeds = sorted(line["tokens_per_second"] for line in lines if line["kind"] == "train")
    return recipe.loop.steps * recipe.loop.batch_rows * recipe.row_tokens / speeds[len(speeds) // 2]


def as_setting(value: Any) -> str:
    """A recipe's value as the command line takes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: ""}[value]
    return str(value)


def kept(path: Path, measure: Callable[[], Any]) -> Any:
    """What a file holds, measured now if it is not there."""
    if not path.is_file():
        write_text(path, json.dumps(measure(), indent=1) + "\n")
    return json.loads(path.read_text(encoding="utf-8"))


def cell_file(args: argparse.Namespace, family: str, arm: str) -> Path:
    """Where what was measured of an arm of a family is kept."""
    path: Path = args.out / f"{file_name(family)}-{file_name(arm)}.json"
    return path


def drafters_of(
    measured: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], seeds: Sequence[int]
) -> dict[str, Path]:
    """The drafters' folders of what was measured, each with its `run`, by family, arm and training seed."""
    return {
        f"{family}, {arm}, seed {seed}": Path(each["run"]) / "drafter"
        for (family, arm), of_seeds in measured.items()
        for seed, each in zip(seeds, of_seeds, strict=True)
    }


# ---- arguments --------------------------------------------------------------------------------


def parser_of(description: str | None, *, out: str | None = None) -> argparse.ArgumentParser:
    """`--set`, `--json`; with a default `out` for what is kept, `--out` and `--seeds` too."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out is not None:
        parser.add_argument("--out", type=Path, default=Path(out), help="where runs and measurements are kept")
        parser.add_argument("--seeds", type=numbers, default=[0], metavar="0,1,2", help="of training, each anew")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    add_setting(parser, "--set", "a value for the recipes")
    return parser


def add_setting(parser: argparse.ArgumentParser, flag: str, what: str) -> None:
    """A flag that may come several times, each time with a recipe's value."""
    parser.add_argument(
        flag,
        type=lambda text: tuple(text.split("=", 1)),
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help=what,
    )


def add_decoding(parser: argparse.ArgumentParser, *, limit: int) -> None:
    """Which prompts are decoded, and how far."""
    parser.add_argument("--prompts", default="stdlib")
    parser.add_argument("--limit", type=int, default=limit, help="prompts")
    parser.add_argument(
        "--prompt-tokens", type=int, default=128, help="texts are cut to their last ones, longer chats are left out"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)


def add_audit(parser: argparse.ArgumentParser, *, tokens: int, sequences: int) -> None:
    """How much the audit looks at."""
    parser.add_argument("--audit-tokens", type=int, default=tokens)
    parser.add_argument("--audit-sequences", type=int, default=sequences)


def names_of(known: dict[str, Any]) -> Any:
    """A list of names with commas between, each of which is known."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = sorted(set(names) - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)} among {', '.join(known)}")
        return names

    return read


def numbers(text: str) -> list[int]:
    """Numbers with commas between."""
    return [int(part) for part in text.split(",") if part.strip()]


def by_seed(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The arguments of each training seed: seed 0 has `--out` itself, seed n `--out`/seed-n;
    `root` is `--out` for all.

    Raises:
        SystemExit: the seed is set by `--set` as well.
    """
    if len(args.seeds) > 1 and "loop.seed" in dict(args.set):
        raise SystemExit("--set loop.seed is for one run; --seeds names the seeds of several")
    return [
        argparse.Namespace(
            **{**vars(args), "root": args.out, "out": args.out / f"seed-{seed}" if seed else args.out, "seed": seed}
        )
        for seed in args.seeds
    ]


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The training seed, unless `--set` has one, and what `--set` asks for."""
    return {"loop.seed": args.seed, **dict(args.set)}
