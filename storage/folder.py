"""A folder that is whole or not there: staged, flushed, its manifest last, one rename.

A folder is written under a hidden name beside its own. Every file is flushed to disk, then the
manifest with sizes and checksums is written and flushed, then the folders' lists of names; one
rename lets it appear, and what it replaces is deleted only after that. So a kill or a power cut
at any moment leaves the old folder, the new one, or neither under its name, and never a half.
Folders in other programs' formats (drafters, exports) carry no manifest of ours.
Read next: `identity.py`; `trainers/loop/checkpoint.py`, the first that uses it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import EnvironmentFailure
from .files import explain_full_disk, flush, sha256
from .formats import MANIFEST_LIST

MANIFEST = "manifest.json"
Fill = Callable[[Path], None]


def staging_of(path: Path) -> Path:
    """Where the folder `path` is written before it appears."""
    return path.with_name(f".staging-{path.name}")


def _replaced(path: Path) -> Path:
    return path.with_name(f".old-{path.name}")


@contextlib.contextmanager
def staged_folder(
    path: Path, *, staging: Path | None = None, manifest: Mapping[str, Any] | None = None, replace: bool = False
) -> Iterator[Path]:
    """An empty folder beside `path` to write into; on leaving it appears as `path`.

    Args:
        staging: where to write; by default `staging_of(path)`, so that what a kill left there is
            removed by the next try. Processes that may race for one path need names of their own.
        manifest: entries of the manifest beside format and files; None: no manifest is written.
            May be filled inside the context.
        replace: replace a folder that is there; otherwise that is an OSError.
    """
    staging = staging or staging_of(path)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
        publish(staging, path, manifest=manifest, replace=replace)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)  # on a full disk it is in the way
        raise


def publish(staging: Path, path: Path, *, manifest: Mapping[str, Any] | None = None, replace: bool = False) -> None:
    """Flush what is staged, write the manifest, rename; arguments as of `staged_folder`."""
    inside = sorted(staging.rglob("*"))
    files = [each for each in inside if each.is_file()]
    for each in files:
        flush(each)
    if manifest is not None:
        text = json.dumps({"format": MANIFEST_LIST.number, **manifest, "files": checksums(files, staging)}, indent=1)
        (staging / MANIFEST).write_text(text, encoding="utf-8")
        flush(staging / MANIFEST)
    for folder in (*(each for each in inside if each.is_dir()), staging):
        flush(folder)
    if replace:
        shutil.rmtree(_replaced(path), ignore_errors=True)
        if path.exists():
            path.rename(_replaced(path))
    staging.rename(path)
    flush(path.parent)
    if replace:
        shutil.rmtree(_replaced(path), ignore_errors=True)


def replace_folder(path: Path, fill: Fill) -> None:
    """Let `fill` write a folder that is exported rather than resumed from: whole, or the old one stays.

    A kill between the two renames leaves both folders, and the next call puts the old one back.

    Raises:
        EnvironmentFailure: the disk is full, and the old folder stays; or a file is in the way.
    """
    restore_folder(path)
    if path.exists() and not path.is_dir():
        raise EnvironmentFailure(f"cannot write the folder {path}: there is a file of that name; move it away")
    with explain_full_disk(path), staged_folder(path, replace=True) as staging:
        fill(staging)


def restore_folder(path: Path) -> None:
    """Undo the first rename of a `replace_folder` that was killed before its second one."""
    old = _replaced(path)
    if old.is_dir() and not path.exists():
        old.rename(path)


def delete_folder(path: Path) -> None:
    """Delete a folder with a manifest; where that is cut short nothing is left that looks complete."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def delete_leftovers(parent: Path, prefix: str) -> None:
    """Delete what kills have left staged, or moved aside, of folders whose names begin with `prefix`."""
    for pattern in (f".staging-{prefix}*", f".old-{prefix}*"):
        for left in parent.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
