"""A chat target made of the embedded one, and the questions that it answers, of the rows that tests keep.

Read next: `../moving_target.py` and `../warm_starts.py`, whose target it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draftsmith as package
from draftsmith.benchmarks.common.runs import QUIET, add_setting, trained
from draftsmith.storage import write_text

CHATS = Path(package.__file__).parent / "tests" / "chats"
HELD_OUT = str(CHATS / "prompts.jsonl")
"""Questions that no row has."""


def chat_target(
    folder: Path, steps: int, given: Mapping[str, Any], *, start: Path | str = "tiny", schedule: str = "cosine"
) -> Path:
    """A target trained on with the chats for so many steps; trained already, it is taken as it is.

    Args:
        folder: of its run.
        given: what `--target-set` asks for.
        start: what it begins as.
    """
    own: dict[str, Any] = {"model.start_from": start, "data.source": CHATS / "chats.jsonl", "loop.steps": steps}
    own |= {"optimizer.schedule": schedule, "optimizer.warmup_steps": min(10, steps)}
    own |= {key: value for key, value in QUIET.items() if key.startswith("loop.")}
    return trained("target-chat", folder, {**own, **given}) / "target"


def questions_in(folder: Path, count: int) -> Path:
    """A file of the first questions with their answers, written now if it is not there."""
    path = folder / "questions.jsonl"
    if not path.is_file():
        lines = (CHATS / "chats.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        write_text(path, "".join(f"{line}\n" for line in lines))
    return path


def add_target_settings(parser: argparse.ArgumentParser) -> None:
    """`--target-set`."""
    add_setting(parser, "--target-set", "a value for the target's recipe")
