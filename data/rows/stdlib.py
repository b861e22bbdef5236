"""The Python standard library's own sources: real text that every machine already has.

The split is a pure function of the module's path, so a file never moves between training,
validation and prompts from one Python version to another. Read next: `rows/packed.py`.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation", "prompts"]

# tests repeat one pattern thousands of times, vendored trees are not the library, and `encodings`
# is a hundred generated tables: easy to foresee, they would flatter every figure measured on them
_SKIPPED = {"__pycache__", "dist-packages", "encodings", "idle_test", "lib-dynload", "site-packages", "test", "tests"}


def stdlib_texts(split: Split) -> Iterator[tuple[str, str]]:
    """Yield (module path, source) of one split, in the order of the paths.

    Paths are relative to the library's folder and use `/`. About 3 % of the modules are held out
    for validation and 3 % for prompts.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(_sources(root)):
        module = path.relative_to(root).as_posix()
        if split_of(module) == split:
            yield module, path.read_text(encoding="utf-8", errors="replace")


def split_of(module: str) -> Split:
    """The split that a module's path belongs to, by its SHA-256."""
    bucket = int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "big") % 100
    if bucket < 3:
        return "validation"
    return "prompts" if bucket < 6 else "train"


def _sources(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if not _SKIPPED.intersection(parts) and not parts[0].startswith("config-"):
            yield path
