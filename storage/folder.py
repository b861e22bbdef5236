"""A folder that is whole or not there: staged, flushed, its manifest last, one rename.

A folder is written under a hidden name beside its own. Every file is flushed to disk, then the
manifest with sizes and checksums is written and flushed, then the folders' lists of names; one
rename lets it appear, and what it replaces changes places with it and is deleted only after that. So
a kill or a power cut at any moment leaves the old folder or the new one, and never a half.
Folders in other programs' formats (drafters, exports) carry no manifest of ours.

Where Linux can (renameat2, on most of its file systems), two folders change places at once, so that a name is never
without its folder.

Read next: `staging.py`, the hidden names; `identity.py`; `trainers/loop/checkpoint.py`, the first that uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import EnvironmentFailure
from .files import explain_full_disk, flush, sha256, shared_mode
from .formats import MANIFEST_LIST
from .staging import delete_leftovers, remove, replaced_of, restore_folder, staging_of

MANIFEST = "manifest.json"
_log = logging.getLogger(__name__)
Fill = Callable[[Path], None]


@contextlib.contextmanager
def staged_folder(
    path: Path, *, staging: Path | None = None, manifest: Mapping[str, Any] | None = None, replace: bool = False
) -> Iterator[Path]:
    """An empty folder beside `path` to write into; on leaving it appears as `path`.

    Args:
        staging: where to write, if not where this process writes it. What killed processes have left is removed.
        manifest: entries of the manifest beside format and files; None: no manifest is written.
            May be filled inside the context.
        replace: replace a folder that is there; otherwise that is an OSError.
    """
    staging = staging or staging_of(path)
    delete_leftovers(path.parent, path.name)
    remove(staging)
    try:
        staging.mkdir(parents=True)
        yield staging
        publish(staging, path, manifest=manifest, replace=replace)
    except BaseException:
        remove(staging)  # on a full disk it is in the way
        restore_folder(path)
        raise


def publish(staging: Path, path: Path, *, manifest: Mapping[str, Any] | None = None, replace: bool = False) -> None:
    """Flush what is staged, write the manifest, rename; arguments as of `staged_folder`."""
    inside = sorted(staging.rglob("*"))
    files = [each for each in inside if each.is_file()]
    for each in files:
        # safetensors makes its files for their owner alone, and an engine may run as somebody else
        each.chmod(shared_mode())
        flush(each)
    if manifest is not None:
        text = json.dumps({"format": MANIFEST_LIST.number, **manifest, "files": checksums(files, staging)}, indent=1)
        (staging / MANIFEST).write_text(text, encoding="utf-8")
        flush(staging / MANIFEST)
    for folder in (*(each for each in inside if each.is_dir()), staging):
        flush(folder)
    old = staging
    if not (replace and path.exists()):
        staging.rename(path)
    elif not swap(staging, path):
        old = replaced_of(path)
        path.rename(old)
        staging.rename(path)
    flush(path.parent)
    remove(old)


def replace_folder(path: Path, fill: Fill) -> None:
    """Let `fill` write a folder that is exported rather than resumed from: whole, or the old one stays.

    Where folders cannot change places, a kill between the two renames leaves both under hidden names,
    and the next call puts the old one back.

    Raises:
        EnvironmentFailure: the disk is full, and the old folder stays; or a file is in the way.
    """
    restore_folder(path)
    if path.exists() and not path.is_dir():
        raise EnvironmentFailure(f"cannot write the folder {path}: there is a file of that name; move it away")
    with explain_full_disk(path), staged_folder(path, replace=True) as staging:
        fill(staging)


def delete_folder(path: Path) -> None:
    """Delete a folder with a manifest; where that is cut short nothing is left that looks complete.

    A file that cannot go yet, as NFS keeps one that is open somewhere, stays under a hidden name until
    `delete_leftovers` comes by.
    """
    (path / MANIFEST).unlink(missing_ok=True)
    aside = staging_of(path)  # no name of what is replaced: nobody must bring it back
    remove(aside)
    try:
        path.rename(aside)
    except OSError:
        aside = path  # without its manifest it is nothing that a run goes on from
    remove(aside)
    if aside.exists():
        _log.warning("%s cannot be deleted whole yet: a file in it may be open elsewhere", aside)


def checksums(files: Iterable[Path], folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of files, by their paths in `folder`: a manifest's list."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, once all its files are found as listed.

    Raises:
        ValueError: they are not; the message has the reason.
    """
    if not folder.is_dir():
        raise ValueError("there is no such folder")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        raise ValueError("no manifest: it was never finished") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"unreadable manifest ({error})") from error
    if manifest.get("format") != MANIFEST_LIST.number:
        raise ValueError(f"format {manifest.get('format')!r}, this version reads {MANIFEST_LIST.number}")
    if not files:
        raise ValueError("the manifest lists no file")
    for name, (size, checksum) in files.items():
        _check_file(folder / name, name, size, checksum)
    return dict(manifest)


def _check_file(path: Path, name: str, size: int, checksum: str) -> None:
    if not path.is_file():
        raise ValueError(f"{name} is missing")
    if path.stat().st_size != size:
        raise ValueError(f"{name} has {path.stat().st_size} bytes, the manifest lists {size}")
    if sha256(path) != checksum:
        raise ValueError(f"{name} does not match its checksum")


def fault(folder: Path) -> str | None:
    """Why a folder with a manifest is not complete, or None where it is."""
    try:
        read_manifest(folder)
    except ValueError as error:
        return str(error)
    return None


_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def swap(one: Path, other: Path) -> bool:
    """Exchange what is at two paths; False, and nothing changed, where that cannot be."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    return rename is not None and bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)
