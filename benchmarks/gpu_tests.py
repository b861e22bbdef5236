"""Tests on the device as a record: by file how many passed, failed and were left out, and the names behind it.

pytest runs with this checkout's settings, over `--workers` processes where pytest-xdist is installed: tests wait for
the host and not for the device. What was skipped is written down with the reasons, and a run in which nothing passed
is a failure: without a GPU the tests of `tests/gpu` skip themselves. After `--seconds` no further test begins, and the
record is written anew every few seconds, so that a slow machine still leaves one of what it did. Read next: `gpu.py`;
`common/device_tests.py`, the plugin.

    python benchmarks/gpu_tests.py tests/gpu --json gpu-tests.json
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
from draftsmith.benchmarks.common import device_tests
from draftsmith.benchmarks.common.device_tests import REASON, UNTIL
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.records import Cell, Record, table_of

EVERY = 3.0  # seconds between two writings of the record
HEADS = {
    "file": "{file}",
    "passed": "{passed}",
    "failed": "{failed}",
    "skipped": "{skipped}",
    "not begun": "{late}",
    "seconds": "{seconds}",
}


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Tally:
    """Counts by file, in the order in which files came, and what a reader would look for behind them."""

    keep: Callable[[Tally], None]
    """Writes the record as far as it goes."""
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    failed: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    kept: float = field(default_factory=time.monotonic)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        if report.failed:
            self._fails(file, report.nodeid)
        elif report.skipped:
            self._skips(file, report)
        elif report.when == "call":
            self.counts[file]["passed"] += 1
        if time.monotonic() > self.kept + EVERY:
            self.keep(self)
            self.kept = time.monotonic()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fails(report.nodeid or "collection", f"{report.nodeid} could not be imported")

    def _fails(self, file: str, name: str) -> None:
        self.counts[file]["failed"] += 1
        self.failed.append(name)

    def _skips(self, file: str, report: pytest.TestReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        self.counts[file]["late" if reason == REASON else "skipped"] += 1
        self.reasons[reason] += 1

    @property
    def rows(self) -> list[dict[str, Cell]]:
        """A row for each file, and one for all."""
        kinds = ("passed", "failed", "skipped", "late")
        rows: list[dict[str, Cell]] = [
            {"file": f"`{file}`", **{kind: counts[kind] for kind in kinds}, "seconds": self.seconds[file]}
            for file, counts in self.counts.items()
        ]
        whole = sum(self.counts.values(), Counter())
        return [*rows, {"file": "all", **{kind: whole[kind] for kind in kinds}, "seconds": sum(self.seconds.values())}]

    @property
    def outcome(self) -> int:
        """0 where something passed, nothing failed, and everything was begun."""
        whole = sum(self.counts.values(), Counter())
        return int(whole["failed"] > 0 or whole["late"] > 0 or whole["passed"] == 0)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    os.environ[UNTIL] = str(time.time() + args.seconds)
    tally = Tally(lambda tally: finish(assembled(tally, args), args.json))
    words = ["-q", "-p", "no:cacheprovider", "-p", device_tests.__name__, "-m", "not slow", "--tb", "short"]
    if args.workers > 1 and find_spec("xdist"):
        words += ["-n", str(args.workers), "--dist", "worksteal"]
    if args.only:
        words += ["-k", args.only]
    code = pytest.main([*words, *args.tests], plugins=[tally])
    record = assembled(tally, args)
    print(printed(record))
    finish(record, args.json)
    return int(code) or tally.outcome


def assembled(tally: Tally, args: argparse.Namespace) -> Record:
    """What was run, by file."""
    return record_of(
        args,
        title=f"Tests on a GPU: {', '.join(args.tests)}",
        command=f"python benchmarks/gpu_tests.py {' '.join(args.tests)}",
        needs=["a CUDA device"],
        target=None,
        setup=f"pytest over {', '.join(f'`{test}`' for test in args.tests)}.",
        formats={**dict.fromkeys(("passed", "failed", "skipped", "late"), ".0f"), "seconds": ".1f"},
        rows=tally.rows,
        tables={"files": table_of(HEADS)},
        notes=notes_of(tally.failed, tally.reasons),
    )


def notes_of(failed: Sequence[str], reasons: Counter[str]) -> list[str]:
    """Which tests failed, and by what reasons others were left out."""
    notes = [f"Failed: {', '.join(f'`{name}`' for name in failed)}."] if failed else []
    return notes + [f"Left out, {count}: {reason}." for reason, count in reasons.most_common()]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="+", help="files and folders of tests, from the root of the checkout")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no test begins later than this")
    parser.add_argument("--only", metavar="WORDS", help="those of them that pytest's -k names")
    parser.add_argument("--workers", type=int, default=1, help="processes, where pytest-xdist is installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
