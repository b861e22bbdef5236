"""Resumable checkpoints that survive a kill at any moment.

Each is a folder with a manifest, which `storage/folder.py` writes: whole or not there. Only when
a new one is on disk are older ones deleted. Readers trust the manifest alone. Tensors are
safetensors, everything else is JSON: no pickle.
Read next: `state.py`, what the loop puts in; `loop.py`, when.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ... import __version__
from ...storage import MANIFEST, MANIFEST_LIST, delete_folder, delete_leftovers, fault, staged_folder, writing

_log = logging.getLogger(__name__)
_PREFIX = "step-"


def write(parent: Path, name: str, fill: Callable[[Path], None], *, manifest: Mapping[str, Any] | None = None) -> Path:
    """Let `fill` write files into a staging folder, then publish it as `parent/name`.

    A complete checkpoint of the same name is kept as it is. `fill` may use sub-folders.

    Args:
        manifest: entries of the manifest beside the files and the version.

    Raises:
        EnvironmentFailure: the disk is full or not writable; nothing published is touched.
    """
    folder = parent / name
    if fault(folder) is not None:
        with (
            writing(folder),
            staged_folder(folder, manifest=written_by() | {**(manifest or {})}, replace=True) as staging,
        ):
            fill(staging)
    return folder


def written_by() -> dict[str, Any]:
    """Entries of a checkpoint's manifest: the version that wrote it."""
    return {"draftsmith": __version__}


def name_of(step: int) -> str:
    """The folder of the checkpoint behind so many steps."""
    return f"{_PREFIX}{step:08d}"


def newest(parent: Path) -> Path | None:
    """The newest complete checkpoint; damaged ones are named in the log and passed over.

    Raises:
        RequestError: one is of another format, which another version wrote. To pass over it would begin anew.
    """
    for folder in reversed(list(_published(parent))):
        _check_format(folder)
        reason = fault(folder)
        if reason is None:
            return folder
        _log.warning("passing over the checkpoint %s: %s", folder, reason)
    return None


def _check_format(folder: Path) -> None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # damage, which `fault` names
    if isinstance(manifest, dict) and isinstance(manifest.get("format"), int):
        version = manifest.get("draftsmith", "another version")
        remedy = f"draftsmith {version} wrote it, and this is {__version__}: go on with that one, or in another --out"
        MANIFEST_LIST.check(manifest["format"], folder / MANIFEST, remedy=remedy)


def delete_older(parent: Path, keep: int, *, than: str | None = None) -> None:
    """Delete all but the newest `keep` complete checkpoints, and what earlier kills have left.

    Args:
        than: name of the newest to count, the one just written. A run that passed over a damaged
            checkpoint writes older names than that one's, which must not push them out.
    """
    published = [folder for folder in _published(parent) if than is None or folder.name <= than]
    complete = [folder for folder in published if (folder / MANIFEST).is_file()]
    for folder in published:
        # without a manifest it is a deletion that was cut short
        if folder not in complete[-keep:]:
            delete_folder(folder)
    delete_leftovers(parent)


def delete_halves(parent: Path, *, alone: bool) -> None:
    """Delete what a kill has left half written or half deleted; see `delete_leftovers` for `alone`."""
    delete_leftovers(parent, alone=alone)
    for folder in _published(parent):
        if not (folder / MANIFEST).is_file():
            delete_folder(folder)


def _published(parent: Path) -> Iterator[Path]:
    if parent.is_dir():
        yield from sorted(folder for folder in parent.glob(f"{_PREFIX}*") if folder.is_dir())
