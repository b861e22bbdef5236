"""The size of the house: files, lines and functions per room, files with one reader, and what a call walks through.

    python benchmarks/house.py                # of this tree
    python benchmarks/house.py FOLDER         # of another checkout
    python benchmarks/house.py --fragments    # files of at most 110 lines that one other file imports
    python benchmarks/house.py --walks        # files behind a training step, an evaluation, an audit, an export

Counts are of what git tracks. A function's lines are those from `def` to its end. The walks train `eagle3-tiny` for
two steps, evaluate, audit and export it, and note each file of the package of which a function is called below the one
that is named. Constants that are only imported do not count.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import draftsmith
import numpy as np

ROOMS = ("decoding", "drafters", "data", "trainers", "eval", "launch", "storage", "benchmarks", "tests")
CORE = ROOMS[:-2]
FRAGMENT_LINES = 110
"""Most lines of a file that may belong into the only one that imports it."""
WALKS = {
    "an EAGLE-3 training step": ("trainers.loop.step", "Steps.take"),
    "`eval`": ("launch.measure.run", "run_eval"),
    "the audit": ("launch.measure.run", "audit_pair"),
    "an export": ("launch.export", "export"),
}
"""What is walked -> the function at its head."""
SMALL_RUN = shlex.split(
    "--loop.steps 2 --loop.batch_rows 2 --loop.micro_rows 2 --loop.validate_rows 2 --data.sequence_length 64 "
    "--data.limit_rows 40 --probe.prompts 1 --probe.max_new_tokens 6 --optimizer.warmup_steps 0"
)
SMALL_EVAL = shlex.split(
    "--eval.limit 1 --eval.max_new_tokens 6 --eval.repeats 1 --audit.tokens 500 --audit.sequences 10000 "
    "--audit.prompts 1 --audit.max_new_tokens 8 --audit.batch 4"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the house.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(draftsmith.__file__).parent)
    parser.add_argument("--fragments", action="store_true")
    parser.add_argument("--walks", action="store_true")
    asked = parser.parse_args()
    if asked.fragments:
        print_fragments(asked.folder)
    elif asked.walks:
        print_walks()
    else:
        print_sizes(asked.folder)


def print_sizes(root: Path) -> None:
    """Files, lines and functions by room."""
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


# ---- files that one other file imports ----------------------------------------------------


def print_fragments(root: Path) -> None:
    """Small files with one reader, smallest first."""
    readers = readers_of(root)
    print("| file | lines | its reader | lines of that |\n|---|---|---|---|")
    for path in sorted(readers, key=lines):
        if len(readers[path]) == 1 and 0 < lines(path) <= FRAGMENT_LINES and not path.stem.startswith("__"):
            (reader,) = readers[path]
            print(f"| {path.relative_to(root)} | {lines(path)} | {reader.relative_to(root)} | {lines(reader)} |")


def readers_of(root: Path) -> dict[Path, set[Path]]:
    """File of the package -> the package's files that import it, for types or inside functions too."""
    files = [path for path in tracked(root) if path.suffix == ".py" and is_in(path.relative_to(root), "core")]
    readers: dict[Path, set[Path]] = {path: set() for path in files}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                names = [folder / f"{alias.name}.py" for alias in node.names]
                found = [
                    each for each in (*names, folder.with_suffix(".py"), folder / "__init__.py") if each in readers
                ]
                for each in found:
                    readers[each].add(path)
    return readers


# ---- files that a call walks through ------------------------------------------------------


def print_walks() -> None:
    """Train, evaluate and export on the embedded target, and say what each walked through."""
    from draftsmith.launch.cli import main as draftsmith_main

    root = Path(draftsmith.__file__).parent
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print("| walk | files | their lines | functions | their lines |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        run = f"{place}/run"
        commands = {
            "an EAGLE-3 training step": ["train", "eagle3-tiny", "--out", run, *SMALL_RUN],
            "`eval`": ["eval", run, "--no-audit", *SMALL_EVAL],
            "the audit": ["audit", run, "--out", f"{place}/audit", *SMALL_EVAL],
            "an export": ["export", run, "--out", f"{place}/exported"],
        }
        for name, command in commands.items():
            module, function = WALKS[name]
            with contextlib.redirect_stdout(sys.stderr), walked(root, f"draftsmith.{module}", function) as called:
                if draftsmith_main(command) != 0:
                    raise SystemExit(f"{' '.join(command)} failed")
            files = {Path(code.co_filename) for code in called}
            sizes = sum(code_lines(code) for code in called)
            print(f"| {name} | {len(files)} | {sum(map(lines, files)):,} | {len(called)} | {sizes:,} |")


@contextlib.contextmanager
def walked(root: Path, module: str, function: str) -> Iterator[set[CodeType]]:
    """Collects the package's code that is called below a function, the function itself among it."""
    owner: Any = importlib.import_module(module)
    *outer, name = function.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original: Callable[..., Any] = getattr(owner, name)
    called: set[CodeType] = set()

    @functools.cache
    def is_core(name: str) -> bool:
        return Path(name).is_relative_to(root) and is_in(Path(name).relative_to(root), "core")

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and is_core(code.co_filename):
            called.add(code)

    def watched(*arguments: Any, **named: Any) -> Any:
        sys.setprofile(note)
        threading.setprofile(note)
        try:
            return original(*arguments, **named)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    setattr(owner, name, watched)
    try:
        yield called
    finally:
        setattr(owner, name, original)


def code_lines(code: CodeType) -> int:
    """Lines of a function, from its `def` to the last that runs."""
    return max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno) - code.co_firstlineno + 1


if __name__ == "__main__":
    main()
