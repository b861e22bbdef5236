"""A pytest plugin for tests that take longer than a sitting: what has passed in this very tree is left out.

A slow test stands for itself: the other files of tests do not count as its tree, so that one which is mended takes
nothing but its own tests along; nor do pages and scripts, unless it speaks of them. Read next: `../all_tests.py`,
which sets it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest

NAMES = "DRAFTSMITH_TESTS_PASSED"
"""The file of what has passed, and the digests of the tree, with colons between."""
_PAGES = ("docs", "README", "benchmark")
"""Words by which a file of tests says that it reads pages or their records, or runs the scripts that write them."""


def digest_of(tree: Path, files: list[Path]) -> str:
    """Of the names and contents of files below a folder."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(tree)}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Tree:
    """What a test's result stands for."""

    whole: str
    """Of all files: for tests that may read any of them, the rules of the house among them."""
    shared: str
    """Of all but the files of tests, their helpers included: for a slow test, together with its own file."""
    unread: str
    """The same without pages, records and scripts: for a slow test that does not read them."""

    @classmethod
    def of(cls, root: Path, files: list[Path]) -> Tree:
        shared = [each for each in files if not is_tests(each, root)]
        unread = [each for each in shared if not is_page(each, root)]
        return cls(*(digest_of(root, each) for each in (files, shared, unread)))

    def digest(self, root: Path, test: str, slow: bool) -> str:
        """Of what a test, by pytest's name for it below the root, is run on."""
        if not slow:
            return self.whole
        file = root / test.partition("::")[0]
        return f"{self.shared if reads_pages(file) else self.unread}-{contents(file)}"

    def knows(self, root: Path, entry: dict[str, Any]) -> bool:
        """Whether a line of what has passed is of this tree."""
        return entry["tree"] in (self.digest(root, entry["test"], slow) for slow in (False, True))


def is_tests(path: Path, root: Path) -> bool:
    """Whether a file holds tests, and nothing that others read."""
    return path.relative_to(root).parts[0] == "tests" and fnmatch(path.name, "test_*.py")


def is_page(path: Path, root: Path) -> bool:
    """Whether a file is one of the pages, of the records behind them, or of the scripts that write these."""
    inside = path.relative_to(root)
    if inside.parts[0] == "benchmarks":
        return inside.parts[1] != "common"  # helpers of tests import from there
    return inside.parts[0] == "docs" or (len(inside.parts) == 1 and inside.suffix == ".md")


@cache
def reads_pages(file: Path) -> bool:
    """Whether a file of tests names pages, their records, or the scripts that write them, by path or by word."""
    text = f"{file}\n{file.read_text(encoding='utf-8')}" if file.is_file() else str(file)
    return any(each in text for each in _PAGES)


@cache
def contents(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""


def is_slow(node: pytest.Item | pytest.TestReport) -> bool:
    """Planted bugs are slow and run the tests of other files, so they are of the whole tree."""
    return "slow" in node.keywords and "test_mutations.py" not in node.nodeid


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """What a file holds, of whatever tree; a line that a stop has cut off is none."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []:
        if line.endswith("\n"):
            yield json.loads(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In workers of xdist as well, which all collect alike."""
    path, *digests = os.environ[NAMES].rsplit(":", 3)
    tree = Tree(*digests)
    passed = {(entry["test"], entry["tree"]) for entry in lines_of(Path(path))}
    left: list[pytest.Item] = []
    known: list[pytest.Item] = []
    for item in items:
        digest = tree.digest(config.rootpath, item.nodeid, is_slow(item))
        (known if (item.nodeid, digest) in passed else left).append(item)
    config.hook.pytest_deselected(items=known)
    items[:] = left
