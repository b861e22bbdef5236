"""A copy of the tree with one bug at a time, and what the tests chosen for it say.

The working tree is never touched. Tests run in a process of their own, on the copy; a bug counts as
seen only where a test fails: a copy that cannot be imported or takes too long is told apart. Read
next: `mutation.py`, what a bug is; `unshrunk.py`, how hypothesis is kept short.
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Literal

from draftsmith.benchmarks.house import tracked
from draftsmith.benchmarks.mutations.mutation import Mutation

Verdict = Literal["killed", "survived", "broken", "timed out"]
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
# pytest's own exit codes
_PASSED, _TEST_FAILED = 0, 1
_SAID = 3000  # characters of a failed run that are shown


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation."""

    mutation: Mutation
    verdict: Verdict
    by: str
    """The test that failed first; empty where none did."""
    seconds: float
    commit: str = ""
    """Of the tree that was copied."""


@dataclass(frozen=True)
class Tested:
    """A run of pytest."""

    code: int | None
    """Its exit code; None where it took too long."""
    output: str

    @property
    def failed(self) -> list[str]:
        """Node ids of what failed, in order."""
        return _FAILED.findall(self.output)


def copied(root: Path, into: Path) -> Path:
    """A copy of what git tracks as `into/draftsmith`, the name that the package has.

    Compiled at once, by content: a mutated file may have the size and the second of the right one, by which
    Python would take its old byte code.
    """
    tree = into / "draftsmith"
    for path in tracked(root):
        new = tree / path.relative_to(root)
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, new)
    compileall.compile_dir(tree, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return tree


def check_clean(tree: Path, mutations: Sequence[Mutation], *, limit: float) -> None:
    """Raise SystemExit unless all chosen tests pass without a bug: else a failure would mean nothing."""
    tests = list(dict.fromkeys(test for each in mutations for test in each.tests))
    found = run_tests(tree, tests, limit=limit, stop=False)
    if found.code != _PASSED:
        names = ", ".join(found.failed) or "see above"
        raise SystemExit(f"{found.output[-_SAID:]}\nwithout any bug these tests fail: {names}")


def outcome_of(tree: Path, mutation: Mutation, *, limit: float) -> Outcome:
    """Plant the bug, run its tests, take it out again."""
    path, began = tree / mutation.file, time.perf_counter()
    text = path.read_text(encoding="utf-8")
    path.write_text(mutation.planted_in(text), encoding="utf-8")
    try:
        found = run_tests(tree, mutation.tests, limit=limit)
    finally:
        path.write_text(text, encoding="utf-8")
    seconds = time.perf_counter() - began
    if found.code is None:
        return Outcome(mutation, "timed out", "", seconds)
    if found.code == _TEST_FAILED and found.failed:
        return Outcome(mutation, "killed", found.failed[0], seconds)
    return Outcome(mutation, "survived" if found.code == _PASSED else "broken", "", seconds)


def run_tests(tree: Path, tests: Sequence[str], *, limit: float, stop: bool = True) -> Tested:
    """Run tests of the copy, up to the first failure with `stop`; `limit` in seconds."""
    words = ["-q", "-p", "no:cacheprovider", "-p", "draftsmith.benchmarks.mutations.unshrunk"]
    words += [f"--basetemp={tree.parent / 'pytest'}", *["-x"] * stop, *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            # without -P the rooms of the copy would be modules of their own beside the package
            [sys.executable, "-P", "-m", "pytest", *words],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return Tested(None, "")
    return Tested(done.returncode, done.stdout + done.stderr)
