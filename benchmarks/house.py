"""The size of the house: files, lines and functions per room, the widest folder, words of the docs.

    python benchmarks/house.py            # of this tree
    python benchmarks/house.py FOLDER     # of another checkout

Counts are of what git tracks. A function's lines are those from `def` to its end.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import draftsmith
import numpy as np

ROOMS = ("decoding", "drafters", "data", "trainers", "eval", "launch", "storage", "benchmarks", "tests")
CORE = ROOMS[:-2]


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(draftsmith.__file__).parent
    files = tracked(root)
    code = [path for path in files if path.suffix == ".py"]
    print("| room | files | lines | function lines: median / 95 % / longest |\n|---|---|---|---|")
    for room in ("core", *ROOMS):
        paths = [path for path in code if is_in(path.relative_to(root), room) and path.read_bytes()]
        if paths:
            print(f"| {room} | {len(paths)} | {sum(map(lines, paths)):,} | {spread([*functions(paths)])} |")
    inner = [path for path in code if is_in(path.relative_to(root), "core") and path.name != "__init__.py"]
    folder, count = Counter(path.parent for path in inner).most_common(1)[0]
    pages = [path for path in files if path.suffix == ".md" and path.relative_to(root).parts[0] == "docs"]
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in pages)
    print(f"\nwidest folder: {folder.relative_to(root)} with {count} files; docs: {len(pages)} pages, {words:,} words")


def tracked(root: Path) -> list[Path]:
    """What git tracks, in order."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    return [path for path in map(root.joinpath, listed.stdout.splitlines()) if path.is_file()]


def is_in(path: Path, room: str) -> bool:
    """Whether a path, relative to the root, belongs to a room; `core` is all that is installed."""
    top = path.parts[0]
    return (top in CORE or len(path.parts) == 1) if room == "core" else top == room


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(paths: Sequence[Path]) -> Iterator[int]:
    """Lines of every function."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1


def spread(sizes: Sequence[int]) -> str:
    """Median, 95th percentile and maximum."""
    median, high = np.percentile(sizes, [50, 95])
    return f"{median:.0f} / {high:.0f} / {max(sizes)}"


if __name__ == "__main__":
    main()
