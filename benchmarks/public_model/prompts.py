"""The prompts of `../smollm2.py`: some to be answered and trained on, some to tune on, some to measure on.

No prompt is of two of them. Read next: `verbs.py`, which is called with them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.function_questions import digest, questions
from draftsmith.data.rows.sources import stdlib_texts
from draftsmith.storage import json_lines, write_text

SPLITS = {"train": "train", "tune": "validation", "measure": "prompts"}
"""Prompts of a stage -> files of the standard library."""
SHARES = {"measure": 5, "tune": 10, "train": 100}
"""Of rows of one's own: those whose hash is below so many hundredths."""


def write_prompts(args: argparse.Namespace) -> None:
    """Rows to be answered, prompts to tune on and prompts to measure on, as JSONL."""
    folder, most = args.out / "prompts", {"train": args.answers, "tune": args.limit, "measure": args.limit}
    for name, limit in most.items():
        if (folder / f"{name}.jsonl").is_file():
            continue
        rows = list(asked(args, name))
        # by a hash, as the first ones are no sample of the others
        rows = sorted(rows, key=lambda row: digest(json.dumps(row)))[:limit]
        if not rows:
            raise SystemExit(f"there are no prompts to {name} on; name more of them")
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def asked(args: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """The chats of a stage, each with an answer that will be replaced."""
    if name == "measure" and args.measured:
        yield from rows_of(args.measured)
    elif args.prompts:
        bounds = {each: (low, high) for (each, high), low in zip(SHARES.items(), (0, *SHARES.values()))}
        low, high = bounds[name]
        for row in rows_of(args.prompts):
            if low <= int(digest(json.dumps(row))[:8], 16) % 100 < high:
                yield row
    else:
        for _, text in stdlib_texts(SPLITS[name]):  # type: ignore[arg-type]
            yield from questions(text)


def rows_of(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from json_lines(file)
