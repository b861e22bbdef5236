"""Tests on the device as a record: by file how many passed, failed and were left out, and the names behind it.

pytest runs in this process, with this checkout's settings. What was skipped is written down with the reasons, and a
run in which nothing passed is a failure: without a GPU the tests of `tests/gpu` skip themselves. After `--seconds` no
further test begins, so that a slow machine still leaves a record of what it did. Read next: `gpu.py`.

    python benchmarks/gpu_tests.py tests/gpu --json gpu-tests.json
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.records import Cell, Record, table_of

NO_TIME = "no time was left for it"
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

    until: float
    """No test begins after this reading of the monotonic clock."""
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    failed: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.until:
            pytest.skip(NO_TIME)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        if report.failed:
            self._fails(file, report.nodeid)
        elif report.skipped:
            self._skips(file, report)
        elif report.when == "call":
            self.counts[file]["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fails(report.nodeid or "collection", f"{report.nodeid} could not be imported")

    def _fails(self, file: str, name: str) -> None:
        self.counts[file]["failed"] += 1
        self.failed.append(name)

    def _skips(self, file: str, report: pytest.TestReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        self.counts[file]["late" if reason == NO_TIME else "skipped"] += 1
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
    tally = Tally(time.monotonic() + args.seconds)
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", *args.tests], plugins=[tally])
    record = assembled(tally, args)
    print(printed(record))
    finish(record, args.json)
    return int(code) or tally.outcome


def assembled(tally: Tally, args: argparse.Namespace) -> Record:
    """What was run, by file."""
    notes = [f"Failed: {', '.join(f'`{name}`' for name in tally.failed)}."] if tally.failed else []
    notes += [f"Left out, {count}: {reason}." for reason, count in tally.reasons.most_common()]
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
        notes=notes,
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="+", help="files and folders of tests, from the root of the checkout")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no test begins later than this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
