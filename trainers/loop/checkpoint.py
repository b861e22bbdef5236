"""Resumable checkpoints that survive a kill at any moment.

Each is a folder with a manifest, which `storage/folder.py` writes: whole or not there. Only when
a new one is on disk are older ones deleted. Readers trust the manifest alone. Tensors are
safetensors, everything else is JSON: no pickle.
Read next: `state.py`, what the loop puts in; `loop.py`, when.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from ...storage import MANIFEST, delete_folder, delete_leftovers, fault, staged_folder, writing

_log = logging.getLogger(__name__)


def write(parent: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Let `fill` write files into a staging folder, then publish it as `parent/name`.

    A complete checkpoint of the same name is kept as it is. `fill` may use sub-folders.

    Raises:
        EnvironmentFailure: the disk is full or not writable; nothing published is touched.
    """
    folder = parent / name
    if fault(folder) is not None:
        with writing(folder), staged_folder(folder, manifest={}, replace=True) as staging:
            fill(staging)
    return folder


def newest(parent: Path, prefix: str = "step-") -> Path | None:
    """The newest complete checkpoint; damaged ones are named in the log and passed over."""
    for folder in reversed(list(_published(parent, prefix))):
        reason = fault(folder)
        if reason is None:
            return folder
        _log.warning("passing over the checkpoint %s: %s", folder, reason)
    return None


def delete_older(parent: Path, keep: int, prefix: str = "step-", *, than: str | None = None) -> None:
    """Delete all but the newest `keep` complete checkpoints, and what earlier kills have left.

    Args:
        than: name of the newest to count, the one just written. A run that passed over a damaged
            checkpoint writes older names than that one's, which must not push them out.
    """
    published = [folder for folder in _published(parent, prefix) if than is None or folder.name <= than]
    complete = [folder for folder in published if (folder / MANIFEST).is_file()]
    for folder in published:
        # without a manifest it is a deletion that was cut short
        if folder not in complete[-keep:]:
            delete_folder(folder)
    delete_leftovers(parent, prefix)


def _published(parent: Path, prefix: str) -> Iterator[Path]:
    if parent.is_dir():
        yield from sorted(folder for folder in parent.glob(f"{prefix}*") if folder.is_dir())
