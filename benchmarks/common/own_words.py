"""Rows in a target's own words: its continuations of windows of training texts, written once by `draftsmith generate`.

Read next: `../alignment.py` and `../draft_weights.py`, which train on them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from draftsmith.data.config import DataConfig
from draftsmith.data.rows.prepare import training_texts
from draftsmith.launch.cli import main as draftsmith
from draftsmith.storage import write_text


def prompts_in(folder: Path, data: DataConfig, count: int) -> Path:
    """A file of so many windows of the training texts alone, written now if it is not there."""
    path = folder / "prompts.jsonl"
    if not path.is_file():
        rows = islice(windows(training_texts(data)), count)
        write_text(path, "".join(json.dumps({"text": window}) + "\n" for window in rows))
    return path


def windows(texts: Iterator[str]) -> Iterator[str]:
    """Two thousand characters from the beginning and the middle of every text."""
    for text in texts:
        lines = text.splitlines(keepends=True)
        for first in sorted({0, len(lines) // 3, 2 * len(lines) // 3}):
            window = "".join(lines[first : first + 60])[:2000]
            if window.strip():
                yield window


def answered(
    prompts: Path,
    out: Path,
    target: str,
    *,
    temperature: float,
    prompt_tokens: int,
    new_tokens: int,
    corrections_of: Path | None = None,
) -> Path:
    """The rows that a target writes behind these prompts; run again, it goes on where it was.

    Args:
        corrections_of: a drafter beside which the target writes: the rows are where it was overruled.
    """
    words: Sequence[object] = ["generate", "--source", prompts, "--out", out, "--target", target, "--batch", 32]
    words = [*words, "--temperature", temperature, "--prompt-tokens", prompt_tokens, "--max-new-tokens", new_tokens]
    words = words if corrections_of is None else [*words, "--drafter", corrections_of, "--corrections"]
    code = draftsmith([str(word) for word in words])
    logging.getLogger("draftsmith").setLevel(logging.WARNING)  # the command line sets its own
    if code:
        raise SystemExit(code)
    return out / ("answers.jsonl" if corrections_of is None else "corrections.jsonl")
