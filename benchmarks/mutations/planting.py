"""A copy of the tree with one bug at a time, and what the tests chosen for it say.

The working tree is never touched. Tests run in a process of their own, on the copy; a bug counts as
seen only where a test fails: a copy that cannot be imported or takes too long is told apart. Read
next: `mutation.py`, what a bug is; `warm.py`, that process; `unshrunk.py`, how hypothesis is kept short.
"""

from __future__ import annotations

import compileall
import json
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
from draftsmith.benchmarks.mutations import warm
from draftsmith.benchmarks.mutations.mutation import Mutation

Verdict = Literal["killed", "survived", "broken", "timed out"]
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
# pytest's own exit codes
_PASSED, _TEST_FAILED = 0, 1
QUICK = "not slow and not fault and not run"
"""What a whole file of tests stands for."""
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


class Bench:
    """A copy in which tests are run; a context manager, as it holds a process that is ready to.

    Attributes:
        tree: the copy.
    """

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self._output = tree.parent / "output"
        self._warm: subprocess.Popen[str] | None = None

    def __enter__(self) -> Bench:
        # without -P the script's neighbours would be modules of their own beside the package
        words = [sys.executable, "-P", str(Path(warm.__file__)), "draftsmith"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.tree.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
            # as tests/conftest.py has them, too late for what is imported before it
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            **({} if Path("/dev/nvidia0").exists() else {"TRITON_INTERPRET": "1"}),
        }
        self._warm = subprocess.Popen(
            words,
            cwd=self.tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._warm is not None:
            self._warm.communicate()

    def run(self, tests: Sequence[str], *, limit: float, stop: bool = True) -> Tested:
        """Run tests of the copy, up to the first failure with `stop`; `limit` in seconds."""
        words = ["-q", "-p", "no:cacheprovider", "-p", "draftsmith.benchmarks.mutations.unshrunk"]
        words += [f"--basetemp={self.tree.parent / 'pytest'}", *["-x"] * stop, *tests]
        if not any("::" in test for test in tests):
            words += ["-m", QUICK]
        assert self._warm is not None
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.write(json.dumps({"words": words, "output": str(self._output), "limit": limit}) + "\n")
        self._warm.stdin.flush()
        code = json.loads(self._warm.stdout.readline())["code"]
        return Tested(code, self._output.read_text(encoding="utf-8", errors="replace"))


def check_clean(bench: Bench, mutations: Sequence[Mutation], *, limit: float) -> None:
    """Raise SystemExit unless all chosen tests pass without a bug: else a failure would mean nothing."""
    tests = list(dict.fromkeys(test for each in mutations for test in each.tests))
    named = [test for test in tests if "::" in test]
    for some in (named, [test for test in tests if test not in named]):
        found = bench.run(some, limit=limit, stop=False) if some else None
        if found is not None and found.code != _PASSED:
            names = ", ".join(found.failed) or "see above"
            raise SystemExit(f"{found.output[-_SAID:]}\nwithout any bug these tests fail: {names}")


def outcome_of(bench: Bench, mutation: Mutation, *, limit: float) -> Outcome:
    """Plant the bug, run its tests, take it out again."""
    path, began = bench.tree / mutation.file, time.perf_counter()
    text = path.read_text(encoding="utf-8")
    path.write_text(mutation.planted_in(text), encoding="utf-8")
    try:
        found = bench.run(mutation.tests, limit=limit)
    finally:
        path.write_text(text, encoding="utf-8")
    seconds = time.perf_counter() - began
    if found.code is None:
        return Outcome(mutation, "timed out", "", seconds)
    if found.code == _TEST_FAILED and found.failed:
        return Outcome(mutation, "killed", found.failed[0], seconds)
    return Outcome(mutation, "survived" if found.code == _PASSED else "broken", "", seconds)
