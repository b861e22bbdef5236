"""Each training method in two processes, each way that a target can lie over them, beside one process.

For every method and way, by `accelerate launch` and the command line that users have, on the CPUs of this machine:

1. one process, then two: the largest difference of any figure that both report, and the data's rows that both read;
2. how much of the target a process holds, from the line that the run logs;
3. two processes once more, of which one is killed (SIGKILL) in front of a step in the middle; the same command goes on
   from the checkpoint, and what it exports is compared with what was exported without the kill.

What a method refuses has its message in its row. A finished cell is kept in `--out` and not measured again.

    python benchmarks/two_ranks.py --json docs/results/two-ranks.json
    python benchmarks/two_ranks.py --methods medusa,eagle3 --ways DDP,team        # some of it; the rest another time
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import draftsmith
from draftsmith.benchmarks.common.kept import file_name, same_settings
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.noted_run import NEVER, read_codes, read_rows
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.common.runs import as_setting, kept, names_of, parser_of
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers.methods import METHODS
from safetensors.torch import load_file

CONFIGS = Path(draftsmith.__file__).parent / "launch" / "configs"
CLOCKS = {"tokens_per_second", "data_wait", "memory_gb", "rollout_share"}
LEAST = 0.01
"""Differences of figures that are smaller than this are taken relative to it."""
STEPS, EVERY, KILLED_AT = 8, 3, 5
SMALL: dict[str, Any] = {
    "data.limit_rows": 60,
    "data.sequence_length": 64,
    "optimizer.name": "adamw",  # ZeRO knows no other
    "optimizer.lr": 1e-3,
    "optimizer.warmup_steps": 2,
    "loop.steps": STEPS,
    "loop.batch_rows": 4,
    "loop.micro_rows": 1,  # terms of heads are scaled by micro-batch, and two processes would make up others
    "loop.precision": "fp32",
    "loop.validate_every": STEPS,
    "loop.validate_rows": 3,
    "loop.log_every": 1,
    "loop.stall_seconds": 120,
    "checkpoint.every_steps": EVERY,
    "checkpoint.keep": 9,
    "probe.every_steps": STEPS,
    "probe.prompts": 1,
    "probe.max_new_tokens": 6,
    "objective.chunk": 64,
}
# what is drawn at random in each process is left out, and what would take long made small
OWN: dict[str, dict[str, Any]] = {
    "eagle": {"eagle.noise": 0.0},
    "medusa2": {"tune.dropout": 0.0, "tune.rest_steps": 1},
    "boost": {
        "boost.members": 2,
        "boost.start_from": '["", ssm-1]',
        "boost.samples": 80,
        "boost.held_out": 6,
        "boost.prompt_tokens": 12,
        "boost.continuation": 8,
    },
}


@dataclass(frozen=True)
class Way:
    """How two processes are launched, and how the target lies over them."""

    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: tuple[str, str] = ("ACCELERATE_USE_CPU", "true")


WAYS = {
    "DDP": Way("multi_cpu"),
    "ZeRO-2": Way("zero2", environment=("DS_ACCELERATOR", "cpu")),
    "fully_shard": Way("multi_cpu", {"target.sharding": "fully_shard"}),
    "offload": Way("multi_cpu", {"target.sharding": "fully_shard", "target.offload": True}),
    "team": Way("multi_cpu", {"target.tensor_parallel": 2}),
}
ONE = Way("cpu")


@dataclass(frozen=True)
class Run:
    """A launch that has ended: its folder, what it noted, what it said."""

    folder: Path
    notes: Path
    said: str

    @property
    def finished(self) -> bool:
        codes = read_codes(self.notes)
        return bool(codes) and not any(codes)

    def refusal(self) -> str | None:
        """What the command refused, if it did."""
        if RequestError.exit_code not in read_codes(self.notes):
            return None
        found = re.search(r"draftsmith: (.*?)(?:\n\S*Error|\nE\d{4}|\nW\d{4}|\Z)", self.said, re.DOTALL)
        whole = " ".join((found[1] if found else self.said).split())
        return "refused: " + whole.split("; ")[0]  # behind that is what to do

    def or_stop(self) -> Run:
        """Itself; SystemExit where it has failed."""
        if not self.finished:
            raise SystemExit(f"{self.folder} has failed:\n{self.said[-3000:]}")
        return self


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free={"json", "methods", "ways"})
    for method in args.methods:
        for way in args.ways:
            row = kept(cell_of(method, way, args), partial(measured, method, way, args))
            print(f"{method}, {way}: {'; '.join(map(str, row.values()))}", flush=True)
    record = assembled(known_rows(args), args)
    print(printed(record))
    finish(record, args.json)


def cell_of(method: str, way: str, args: argparse.Namespace) -> Path:
    """Where a finished cell is kept."""
    return Path(args.out / "cells" / f"{method}-{file_name(way)}.json")


def known_rows(args: argparse.Namespace) -> list[dict[str, Cell]]:
    """Every cell that is kept, of this call or an earlier one, in the table's order."""
    every = [(method, way) for method in METHODS for way in WAYS]
    return [
        {"method": method, "way": way, **json.loads(path.read_text(encoding="utf-8"))}
        for method, way in every
        if (path := cell_of(method, way, args)).is_file()
    ]


# ---- launches ---------------------------------------------------------------------------------


def measured(method: str, way: str, args: argparse.Namespace) -> dict[str, Cell]:
    """A row of the table, less its names."""
    place = Path(args.out) / "runs"
    two = launch(method, WAYS[way], place / f"{method}-{file_name(way)}", args)
    if refusal := two.refusal():
        return {"first": refusal, "difference": "", "held": "", "rows": "", "resumed": ""}
    alone = one_process(method, place / f"{method}-alone", args)
    mine, theirs = records_of(two.or_stop().folder), records_of(alone.folder)
    return {
        "first": difference_text(first_step(mine), first_step(theirs)),
        "difference": difference_text(mine, theirs),
        "held": held(two.said),
        "rows": rows_text(two, alone),
        "resumed": resumed(method, way, two, args),
    }


def one_process(method: str, folder: Path, args: argparse.Namespace) -> Run:
    """The run of one process, which every way of a method is compared with; launched where it is not there yet."""
    there = Run(folder, folder.with_name(f"{folder.name}-notes"), "")
    return there if there.finished else launch(method, ONE, folder, args).or_stop()


def resumed(method: str, way: str, whole: Run, args: argparse.Namespace) -> str:
    """A run that was killed and went on, beside the one that was not."""
    folder = whole.folder.with_name(f"{whole.folder.name}-killed")
    launch(method, WAYS[way], folder, args, killed_at=str(KILLED_AT))
    last = folder.rglob(f"checkpoints/step-{STEPS:08d}")
    if not any(folder.rglob("checkpoints/step-*")) or any(last):
        raise SystemExit(f"{folder} was to be killed between its first checkpoint and its last one, and was not")
    launch(method, WAYS[way], folder, args, anew=False).or_stop()
    return drafter_text(folder, whole.folder)


def launch(
    method: str, way: Way, folder: Path, args: argparse.Namespace, *, killed_at: str = NEVER, anew: bool = True
) -> Run:
    """One launch through the command line; whatever was in the folder is gone, unless it is to go on there."""
    notes = folder.with_name(f"{folder.name}-notes")
    shutil.rmtree(notes, ignore_errors=True)
    if anew:
        shutil.rmtree(folder, ignore_errors=True)
    values = settings_of(method, way, args)
    words = [f"--{name}={as_setting(value)}" for name, value in values.items()]
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(CONFIGS / f"{way.config}.yaml"),
    ]
    if way is not ONE:
        command += ["--num_processes", "2", "--main_process_port", str(free_port())]
    command += ["-m", "draftsmith.benchmarks.common.noted_run", str(notes), killed_at]
    command += ["train", f"{method}-tiny", "--out", str(folder), *words]
    name, value = way.environment
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning", name: value}
    done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, check=False)
    return Run(folder, notes, done.stdout + done.stderr)


def settings_of(method: str, way: Way, args: argparse.Namespace) -> dict[str, Any]:
    """Of the small settings those that the method reads, for it refuses others; and all that the way asks for."""
    recipe = load_recipe(f"{method}-tiny").recipe
    rows = {"data.cache": Path(args.out).resolve() / "rows"}
    given = {**SMALL, **rows, **OWN.get(method, {}), **dict(args.set)}
    read = {name: value for name, value in given.items() if METHODS[method].reads_value(name, recipe)}
    return read | way.settings


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- comparisons ------------------------------------------------------------------------------

Records = dict[tuple[str, str, int], dict[str, float]]


def records_of(run: Path) -> Records:
    """All that a run has reported, by file, kind and step; a run of several loops has a file each."""
    found: Records = {}
    for path in sorted(run.rglob("metrics.jsonl")):
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            key = (str(path.relative_to(run)), line.pop("kind"), line.pop("step"))
            found[key] = {name: each for name, each in line.items() if name not in CLOCKS}
    return found


def difference(mine: Records, alone: Records) -> tuple[float, str]:
    """The largest one and the name of its figure; a way that does not decode has no probes.

    Raises:
        SystemExit: one has reported what the other has not.
    """
    probed = any(kind == "probe" for _, kind, _ in mine)
    wanted = {key: values for key, values in alone.items() if probed or key[1] != "probe"}
    if mine.keys() != wanted.keys() or not mine:
        raise SystemExit(f"not the same reports: {sorted(mine.keys() ^ wanted.keys())}")
    largest = (0.0, "")
    for key, values in wanted.items():
        if mine[key].keys() != values.keys():
            raise SystemExit(f"not the same figures in {key}: {sorted(mine[key].keys() ^ values.keys())}")
        for name, value in values.items():
            far = abs(mine[key][name] - value) / max(abs(value), LEAST)
            largest = (far, name) if far > largest[0] else largest
    return largest


def difference_text(mine: Records, alone: Records) -> str:
    """As the table shows it."""
    far, name = difference(mine, alone)
    return f"{far:.1e} ({name})" if far else "none"


def first_step(records: Records) -> Records:
    """The reports of training behind the first step."""
    return {key: values for key, values in records.items() if key[1:] == ("train", 1)}


def held(said: str) -> str:
    """Numbers of the target on each process over all of its numbers, by the line that the run has logged."""
    found = re.search(r"([\d.]+) M of the target's ([\d.]+) M numbers on each of 2 processes", said)
    if found is None:
        return "all"
    return f"{float(found[1]) / float(found[2]):.2f} ({found[1]} of {found[2]} M numbers)"


def rows_text(two: Run, alone: Run) -> str:
    """Of the rows that one process reads, those that two read together, each as often; then those too many."""
    mine, theirs = read_rows(two.notes), read_rows(alone.notes)
    text = f"{(mine & theirs).total()} of {theirs.total()}"
    extra = (mine - theirs).total()
    return f"{text}, and {extra} too many" if extra else text


def drafter_text(mine: Path, whole: Path) -> str:
    """Whether two runs have exported the same, to the bit, or how far apart it is.

    Raises:
        SystemExit: one has exported what the other has not.
    """
    ours, theirs = exported(mine), exported(whole)
    if ours.keys() != theirs.keys() or not ours:
        raise SystemExit(f"{mine} and {whole} have not exported the same: {sorted(ours.keys() ^ theirs.keys())}")
    if all(ours[name].equal(theirs[name]) for name in theirs):
        return "the same bits"
    far = max(float((ours[name].double() - each.double()).abs().max()) for name, each in theirs.items())
    return f"differs by {far:.1e}"


def exported(run: Path) -> dict[str, Any]:
    """Every tensor that a run has written, less its checkpoints and stored rows."""
    files = [
        path
        for path in sorted(run.rglob("*.safetensors"))
        if not {"checkpoints", "continuations"} & set(path.relative_to(run).parts)
    ]
    return {f"{path.relative_to(run)}/{name}": each for path in files for name, each in load_file(path).items()}


# ---- the record -------------------------------------------------------------------------------


def assembled(rows: Sequence[dict[str, Cell]], args: argparse.Namespace) -> Record:
    """Every row that is kept."""
    missing = {way: [method for method in METHODS if not cell_of(method, way, args).is_file()] for way in WAYS}
    left = [f"{way} of {', '.join(methods)}" for way, methods in missing.items() if methods]
    heads = {
        "method": "`{method}`",
        "two processes": "{way}",
        "largest difference from one process: first step": "{first}",
        "all steps": "{difference}",
        "of the target on each": "{held}",
        "rows read, of those of one process": "{rows}",
        "killed and resumed": "{resumed}",
    }
    return record_of(
        args,
        title="Two processes",
        target=target_weights("tiny"),
        setup=f"The shipped `METHOD-tiny` recipes for {STEPS} steps of {SMALL['loop.batch_rows']} rows of "
        f"{SMALL['data.sequence_length']} tokens in fp32, a row at a time, a thread each, without noise that each "
        "process draws by itself. Differences are of every figure of every report but clocks (losses, terms, gradient "
        "norms, held-out losses, probes where both decode), relative to the figure or to "
        f"{LEAST:g} where that is more, with the name of the figure. SIGKILL for the second process in front of step "
        f"{KILLED_AT + 1}, a checkpoint every {EVERY} steps.",
        rows=list(rows),
        tables={"two-ranks": table_of(heads)},
        notes=[
            "`DDP` and `ZeRO-2` hold the whole target in each process; `fully_shard` cuts its layers, `offload` keeps "
            "the shares in the host's memory, `team` is `target.tensor_parallel: 2`.",
            "Processes add sums up in another order than one does. AdamW makes a whole step of a gradient that is "
            "such rounding alone, so that later steps may differ by more than the first one.",
        ],
        not_measured=[f"{'; '.join(left)} (a later call goes on)"] if left else [],
    )


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/two-ranks"), help="where runs and cells are kept")
    parser.add_argument("--methods", type=names_of(METHODS), default=list(METHODS), metavar="A,B")
    parser.add_argument("--ways", type=names_of(WAYS), default=list(WAYS), metavar="A,B")
    return parser.parse_args()


if __name__ == "__main__":
    main()
