"""The run's folder: fit to be written, held against other runs, cleared of what kills have left.

Read next: `storage/held.py`, the lock; `resume.py`, whether the run may go on there; `run.py`, which asks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import RequestError
from ...storage import check_name, delete_leftovers, hold, is_first, writable_folder, write_text, writing
from ...storage.staging import remove
from ..recipe.load import Resolved
from .resume import check_resume

_FILES = ("run.yaml", "status.json", "metrics.jsonl", "data.json", "rejected.jsonl")
_FOLDERS = ("checkpoints", "drafter", "target", "tokenizer", "continuations")


@contextmanager
def held_folder(folder: Path, resolved: Resolved, resume: str) -> Iterator[None]:
    """Make the run's folder, and keep other runs out of it inside.

    Raises:
        RequestError: `resume` asks for what cannot be gone on with, another run is at work there, or a
            file is in the way: nothing is written then. EnvironmentFailure: nobody may write there.
    """
    check_name(folder)
    check_resume(folder, resolved.recipe, resume)
    writable_folder(folder)
    check_places(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not is_first():
        yield  # the first process holds the folder for all
        return
    with hold(folder) as alone:
        check_resume(folder, resolved.recipe, resume)  # again: from here on nobody else writes
        _clear(folder, alone=alone)
        with writing(folder):
            write_text(folder / "run.yaml", resolved.yaml())
        yield


def check_places(folder: Path) -> None:
    """Raise RequestError where something else has the name of what the run writes."""
    for name in _FILES:
        if (folder / name).is_dir():
            raise RequestError(f"{folder / name} is a folder, where the run writes a file: move it away")
    for name in _FOLDERS:
        if os.path.lexists(folder / name) and not (folder / name).is_dir():
            raise RequestError(f"{folder / name} is a file, where the run writes a folder: move it away")


def _clear(folder: Path, *, alone: bool) -> None:
    """Delete what killed runs have left half written or half deleted."""
    from ...trainers.loop.checkpoint import delete_halves

    remove(folder / ".alive")  # `trainers/loop/interruptions.py`
    for place in (folder, folder / "eval", folder / "continuations", *folder.glob("ssm-*")):
        delete_leftovers(place, alone=alone)
    for place in (folder, *folder.glob("ssm-*")):
        delete_halves(place / "checkpoints", alone=alone)
