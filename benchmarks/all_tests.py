"""Every test there is, over as many sittings as it takes, as a record: by folder how many passed, and what did not.

What passed in this very tree, by the contents of what git tracks, is kept in `.cache/tests.jsonl` and not run again: a
run that was stopped goes on, and one in which something failed begins with that. To a slow test, another file of tests
is no other tree. Read next: `common/passed_tests.py`, the plugin that leaves them out; `gpu_tests.py`, which counts.

    python benchmarks/all_tests.py                                    # what `make test-all` runs
    python benchmarks/all_tests.py --json docs/results/test-all.json
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import draftsmith
import pytest
from draftsmith.benchmarks.common import passed_tests
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.passed_tests import NAMES, Tree, is_slow, lines_of
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.gpu_tests import notes_of
from draftsmith.benchmarks.house import tracked

ROOT = Path(draftsmith.__file__).parent
KEPT = ROOT / ".cache" / "tests.jsonl"
HEADS = {
    "folder": "{folder}",
    "passed": "{passed}",
    "left out": "{skipped}",
    "failed": "{failed}",
    "seconds": "{seconds}",
}


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Sitting:
    """Writes down what passes, and what is left out by a reason of its own, as soon as it has."""

    kept: Path
    tree: Tree
    failed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    skipped: dict[str, str] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped[report.nodeid] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")
        if report.when == "teardown" and report.nodeid not in self.failed:
            self._keep(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid or "collection")

    def known(self) -> dict[str, dict[str, Any]]:
        """What has passed in all sittings, by its name."""
        return {entry["test"]: entry for entry in lines_of(self.kept) if self.tree.knows(Path.cwd(), entry)}

    def _keep(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        entry = {
            "tree": self.tree.digest(Path.cwd(), test, is_slow(report)),
            "test": test,
            "skipped": self.skipped.get(test, "").removeprefix("Skipped: "),
            "seconds": round(self.seconds[test], 2),
        }
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        with self.kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    tree = Tree.of(ROOT, tracked(ROOT))
    os.environ[NAMES] = f"{args.kept}:{tree.whole}:{tree.shared}:{tree.unread}"
    sitting = Sitting(args.kept, tree)
    print(f"{len(sitting.known())} tests of this tree have passed before; the others run now", flush=True)
    words = ["-p", passed_tests.__name__, "-n", str(args.workers), "--dist", "worksteal", "--tb", "short"]
    code = int(pytest.main([*words, *args.tests], plugins=[sitting]))
    record = assembled(sitting, args)
    print(printed(record))
    finish(record, args.json)
    # nothing was left to run: all is known to pass
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED and record.rows else code


def assembled(sitting: Sitting, args: argparse.Namespace) -> Record:
    """Of all sittings over this tree."""
    known = sitting.known()
    counts: dict[str, Counter[str]] = {}
    for test, entry in known.items():
        row = counts.setdefault(folder_of(test), Counter())
        row["skipped" if entry["skipped"] else "passed"] += 1
        row["seconds"] += entry["seconds"]
    for test in sitting.failed:
        counts.setdefault(folder_of(test), Counter())["failed"] += 1
    kinds = ("passed", "skipped", "failed", "seconds")
    rows: list[dict[str, Cell]] = [
        {"folder": f"`{folder}`", **{kind: float(counts[folder][kind]) for kind in kinds}} for folder in sorted(counts)
    ]
    whole = sum(counts.values(), Counter())
    rows.append({"folder": "all", **{kind: float(whole[kind]) for kind in kinds}})
    reasons = Counter(entry["skipped"] for entry in known.values() if entry["skipped"])
    return record_of(
        args,
        title="Every test",
        target=None,
        setup=f"pytest over {args.workers} processes, in as many sittings as it took; seconds of all added up.",
        formats=dict.fromkeys(kinds, ".0f"),
        rows=rows,
        tables={"folders": table_of(HEADS)},
        notes=notes_of(sitting.failed, reasons),
    )


def folder_of(test: str) -> str:
    """The first two parts of a test's path, one where it stands at the root."""
    return "/".join(test.partition("::")[0].split("/")[:2])


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", default=["tests"], help="files and folders, from the root of the checkout")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--kept", type=Path, default=KEPT, metavar="FILE", help="where what passed is written down")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
