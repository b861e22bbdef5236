"""A pytest plugin for tests that take longer than a sitting: what has passed in this very tree is left out.

Read next: `../all_tests.py`, which sets it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = "DRAFTSMITH_TESTS_PASSED"
"""The file of what has passed, and the digest of the tree, with a colon between."""


def digest_of(tree: Path, files: list[Path]) -> str:
    """Of the names and contents of files below a folder."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(tree)}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()[:16]


def lines_of(path: Path, digest: str) -> Iterator[dict[str, Any]]:
    """What the file holds of this tree; a line that a stop has cut off is none."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []:
        if line.endswith("\n") and (entry := json.loads(line)).pop("tree") == digest:
            yield entry


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In workers of xdist as well, which all collect alike."""
    path, _, digest = os.environ.get(NAMES, "").rpartition(":")
    passed = {entry["test"] for entry in lines_of(Path(path), digest)} if path else set()
    left = [item for item in items if item.nodeid not in passed]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = left
