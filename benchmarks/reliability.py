"""How often each thing that happens to runs was tried, and how often it lost something: runs the tests that do it.

Each reliability test calls `tally` (`tests/helpers/reliability_tally.py`) behind what it tried. This script finds the
tests of a row by that call, runs them, and adds up. Rows that have no test, or whose tests all skip, say so.

    python benchmarks/reliability.py --json docs/results/reliability.json
    python benchmarks/reliability.py --only kills --json docs/results/reliability.json   # this row anew
    python benchmarks/reliability.py --only recipes --fast                               # the share of `make test`

Then `python benchmarks/tables.py` writes docs/reliability.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import draftsmith
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import commit, finish, record_of
from draftsmith.benchmarks.common.records import Cell, Record, read_record, table_of
from scipy.stats import beta

ROOT = Path(draftsmith.__file__).parent
NONE = "not yet measured"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    """As the tests call it."""
    tried: str
    """What they do, and what would count as a loss."""
    goal: str
    """How often it is to be tried."""


ROWS = [
    Row(
        "kills",
        "SIGKILL at a random moment of preparation, step, save, probe or export; resumed to the same bits",
        "500",
    ),
    Row(
        "crash points",
        "the process ends behind each single file operation of a writer; what is left is whole",
        "every operation",
    ),
    Row(
        "signals",
        "SIGTERM, SIGINT, SIGHUP or SIGUSR1 at any stage, to one process of two too: a checkpoint behind the same "
        "step of all, exit code 75, resumed to the same bits",
        "100",
    ),
    Row(
        "second signal in a save",
        "a second signal, or SIGKILL, before any file operation of the save that the first one asked for: one of two "
        "checkpoints is whole, resumed to the same bits",
        "50",
    ),
    Row("disk full", "no room at a write; one message, older checkpoints whole, resumed to the same bits", "20"),
    Row(
        "damaged checkpoints",
        "a file cut, emptied, changed in one byte, missing or of another run; named, and the next older one used",
        "30",
    ),
    Row("second run in one folder", "a second run is started in the folder of one that lives; refused", "50"),
    Row("exact resume", "stopped behind a step, resumed: weights, moments, losses and row order bit for bit", "468"),
    Row("resume of a resume", "stopped twice or three times, at ends of epochs too; bit for bit", "60"),
    Row("resume of several processes", "two processes (gloo), ZeRO-2, ZeRO-3; bit for bit", "9"),
    Row("world sizes", "1, 2, 4 and 1 processes in turn: every row once, the loss of one process", "every stage"),
    Row("determinism", "the same run again; bit for bit", "5"),
    Row(
        "surroundings",
        "clock jumps, time zones, temporary folder, home, network, cache, locale, paths; the same bits",
        "25",
    ),
    Row(
        "non-finite steps",
        "loss, gradient or feature not finite, on one process of two too: the step is skipped on "
        "all, no weight is non-finite",
        "1,000",
    ),
    Row(
        "non-finite weights",
        "a weight of one process of two turns non-finite, under DeepSpeed too: no checkpoint holds it",
        "2",
    ),
    Row(
        "out of memory",
        "memory ends in forward, backward, update or save: the same batch in smaller parts, or one message",
        "every place",
    ),
    Row(
        "stopped processes",
        "one of two processes is stopped or killed: the others end within the recipe's bound, "
        "name it, and none is left",
        "20",
    ),
    Row("flat memory", "20,000 steps: memory grows by less than 1 %, open files stay", "20,000"),
    Row(
        "older versions", "a checkpoint of each released version is resumed, or refused by its version", "each version"
    ),
    Row("data files", "damaged and odd files of rows: each bad row named, nothing else lost", "60"),
    Row("fuzzed rows", "rows changed at random: used, or rejected with file and line", "10,000"),
    Row("recipes", "wrong recipes and flags: one message, exit code 2", "200"),
    Row(
        "hostile folders",
        "models, drafters, manifests and templates made to do harm: nothing executed, nothing written outside",
        "60",
    ),
]


def main() -> None:
    args = arguments()
    chosen = [row for row in ROWS if args.only is None or row.name in args.only]
    known = {str(cells["row"]): cells for cells in kept(args.json)}
    losses = 0.0
    for row in chosen:
        nodes = tests_of(row.name)
        cells = measured(row, nodes, fast=args.fast) if nodes else {}
        known[row.name] = described(row, nodes) | cells
        lost = cells.get("lost", 0.0)
        losses += lost if isinstance(lost, float) else 0.0
        print(f"{row.name}: {known[row.name]['tried']} tried, {lost:g} lost", flush=True)
    record = assembled([known.get(row.name, described(row, tests_of(row.name))) for row in ROWS], args)
    print(printed(record))
    finish(record, args.json)
    raise SystemExit(bool(losses))


# ---- which tests --------------------------------------------------------------------------------


def tests_of(name: str) -> list[str]:
    """The tests that try what the row `name` counts: those that call `tally` with it, or call what does."""
    return [
        f"{path.relative_to(ROOT).as_posix()}::{test}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if name in tallied(source := path.read_text(encoding="utf-8"))
        for test in tallying(source, name)
    ]


def tallied(source: str) -> set[str]:
    """The rows that a file's calls of `tally` name."""
    return {row for function in functions(source) for row in rows_named(function)}


def tallying(source: str, name: str) -> list[str]:
    """Test functions of a file that reach a `tally` of the row, by way of the file's own functions too."""
    each = {function.name: function for function in functions(source)}
    reaching = {function.name for function in each.values() if name in rows_named(function)}
    while more := {key for key, function in each.items() if called(function) & reaching} - reaching:
        reaching |= more
    return [key for key in each if key in reaching and key.startswith("test_")]


def functions(source: str) -> list[ast.FunctionDef]:
    """The functions of a file's top level."""
    return [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def rows_named(function: ast.FunctionDef) -> set[str]:
    """Rows whose tally the function calls itself."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call) and node.args)
    return {
        str(call.args[0].value)
        for call in calls
        if ast.unparse(call.func).endswith("tally") and isinstance(call.args[0], ast.Constant)
    }


def called(function: ast.FunctionDef) -> set[str]:
    """Names that a function reads, its fixtures included."""
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return names | {argument.arg for argument in function.args.args}


# ---- running them -------------------------------------------------------------------------------


class Ran(NamedTuple):
    """What one call of pytest did."""

    tried: float
    lost: float
    seconds: float


def measured(row: Row, nodes: Sequence[str], *, fast: bool) -> dict[str, Cell]:
    """The cells of a row whose tests have run; none where all of them skipped."""
    ran = run(row.name, nodes, fast=fast)
    if not ran.tried:
        return {}
    return {
        "tried": ran.tried,
        "lost": ran.lost,
        "bound": bound(ran.tried, ran.lost),
        "minutes": ran.seconds / 60,
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def run(name: str, nodes: Sequence[str], *, fast: bool = False) -> Ran:
    """Run the tests and add up what they tallied. A test that fails without a tally has lost once."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tallies, junit = Path(folder) / "tallies", Path(folder) / "junit.xml"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "no:cacheprovider",
                f"--junitxml={junit}",
                *(["-m", "not slow"] if fast else []),
                *nodes,
            ],
            cwd=ROOT,
            env={**os.environ, "DRAFTSMITH_TALLY": str(tallies)},
        )
        failed = failures(ElementTree.fromstring(junit.read_bytes()))
        mine = [line for line in read_tallies(tallies) if line["row"] == name]
    tried, lost = (float(sum(line[key] for line in mine)) for key in ("tried", "failed"))
    untold = max(0.0, failed - lost)
    return Ran(tried + untold, lost + untold, time.perf_counter() - began)


def failures(junit: ElementTree.Element) -> int:
    """Failures and errors of all suites of a junit file."""
    return sum(int(suite.get(key, 0)) for suite in junit.iter("testsuite") for key in ("failures", "errors"))


def read_tallies(path: Path) -> Iterator[dict]:
    """The lines that `tally` wrote."""
    if path.is_file():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def bound(tried: float, lost: float) -> float:
    """The rate of losses, in per cent, that is excluded with 95 % confidence: 3/N where nothing was lost."""
    return 100 * min(1.0, 3 / tried if not lost else float(beta.ppf(0.95, lost + 1, max(tried - lost, 1e-9))))


# ---- the record ---------------------------------------------------------------------------------


def described(row: Row, nodes: Iterable[str]) -> dict[str, Cell]:
    """The cells of a row without a measurement."""
    return {
        "row": row.name,
        "what": row.tried,
        "goal": row.goal,
        "command": command(nodes),
        "tried": NONE,
        "lost": None,
        "bound": None,
        "minutes": None,
        "commit": None,
        "date": None,
    }


def command(nodes: Iterable[str]) -> str:
    """What runs the tests of a row, in the table's words; whole files where their tests are many."""
    nodes = sorted(nodes)
    if not nodes:
        return "-"
    files = sorted({node.split("::")[0] for node in nodes})
    tests = sorted({re.sub(r"^test_", "", node.split("::")[1]) for node in nodes})
    chosen = f" -k {tests[0]}" if len(tests) == 1 else ""
    return f"`pytest {' '.join(files)}{chosen}`"


def kept(path: Path | None) -> list[dict[str, Cell]]:
    """The rows of an earlier record, which `--only` leaves as they are."""
    return read_record(path).rows if path is not None and path.is_file() else []


def assembled(rows: list[dict[str, Cell]], args: argparse.Namespace) -> Record:
    """All rows as a record."""
    heads = {
        "what is done": "**{row}**: {what}",
        "tried": "{tried}",
        "lost": "{lost}",
        "at most, with 95 % confidence": "{bound} %",
        "goal": "{goal}",
        "command": "{command}",
        "of": "{date}, {commit}",
    }
    return record_of(
        args,
        command="python benchmarks/reliability.py",
        title="How often it was tried, and what was lost",
        target=None,
        setup="Each row is what its tests tried, on the machine below; every row names its own date and commit.",
        formats={"tried": ",.0f", "lost": ",.0f", "bound": ".3g", "minutes": ".1f"},
        rows=rows,
        tables={"reliability": table_of(heads)},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[row.name for row in ROWS], help="a row; may be repeated")
    parser.add_argument("--fast", action="store_true", help="without the tests that are marked slow")
    parser.add_argument("--json", type=Path, help="write the record here; rows that are not run stay as they are")
    return parser.parse_args()


if __name__ == "__main__":
    main()
