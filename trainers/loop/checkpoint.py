"""Resumable checkpoints that survive a kill at any moment.

A checkpoint is staged in a sibling folder, every file is flushed to disk, the manifest with sizes
and checksums is written last, one rename publishes it, and only then are older ones deleted.
Readers trust the manifest alone. Tensors are safetensors, everything else is JSON: no pickle.
Read next: `state.py`, what the loop puts in; `loop.py`, when.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from ...errors import EnvironmentFailure
from ...storage import flush, sha256, told_when_full

MANIFEST = "manifest.json"
FORMAT = 1
_log = logging.getLogger(__name__)


def write(parent: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Let `fill` write files into a staging folder, then publish it as `parent/name`.

    A complete checkpoint of the same name is kept as it is. `fill` may use sub-folders.

    Raises:
        EnvironmentFailure: the disk is full or not writable; nothing published is touched.
    """
    place = parent / name
    if is_complete(place):
        return place
    staging = parent / f".staging-{name}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        fill(staging)
        publish(staging, place)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        free = shutil.disk_usage(parent).free / 1e6 if parent.is_dir() else 0
        raise EnvironmentFailure(
            f"cannot write the checkpoint {place}: {getattr(error, 'strerror', None) or error}; "
            f"{free:.0f} MB are free there. Earlier checkpoints are intact: make room, then run "
            "the same command again"
        ) from error
    return place


def publish(staging: Path, place: Path) -> None:
    """Flush what is staged, write the manifest, rename."""
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    entries = {}
    for path in files:
        flush(path)
        entries[path.relative_to(staging).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = staging / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": entries}, indent=1))
    flush(manifest)
    for folder in {path.parent for path in files} | {staging}:
        flush(folder)
    if place.exists():
        # an incomplete folder of that name: it has no valid manifest, so nothing reads it
        shutil.rmtree(place)
    staging.rename(place)
    flush(place.parent)


def is_complete(place: Path) -> bool:
    """Whether the manifest of `place` is there and every file matches it."""
    return fault(place) is None


def fault(place: Path) -> str | None:
    """Why `place` cannot be resumed from, or None."""
    if not place.is_dir():
        return "there is no such folder"
    try:
        manifest = json.loads((place / MANIFEST).read_text())
        files = manifest["files"]
    except FileNotFoundError:
        return "no manifest: it was never finished"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable manifest ({error})"
    if manifest.get("format") != FORMAT:
        return f"format {manifest.get('format')!r}, this version reads {FORMAT}"
    for name, entry in files.items():
        path = place / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}"
        if sha256(path) != entry["sha256"]:
            return f"{name} does not match its checksum"
    return None


def newest(parent: Path, prefix: str = "step-") -> Path | None:
    """The newest complete checkpoint; damaged ones are named in the log and passed over."""
    for place in reversed(list(_published(parent, prefix))):
        reason = fault(place)
        if reason is None:
            return place
        _log.warning("passing over the checkpoint %s: %s", place, reason)
    return None


def delete_older(parent: Path, keep: int, prefix: str = "step-") -> None:
    """Delete all but the newest `keep` complete checkpoints, and what earlier kills left staged."""
    complete = [place for place in _published(parent, prefix) if (place / MANIFEST).is_file()]
    for place in complete[:-keep]:
        # the manifest goes first: a deletion that is cut short leaves nothing that looks complete
        (place / MANIFEST).unlink()
        shutil.rmtree(place)
    for staging in parent.glob(f".staging-{prefix}*"):
        shutil.rmtree(staging, ignore_errors=True)


def replace_folder(place: Path, fill: Callable[[Path], None]) -> None:
    """Write a folder that is exported rather than resumed from: whole, or the old one stays.

    The old folder is moved aside only after the new one is on disk; a kill between the two
    renames leaves both, and the next call puts the place in order.

    Raises:
        EnvironmentFailure: the disk is full; the old folder stays.
    """
    put_back(place)
    staging, old = (place.with_name(f".{word}-{place.name}") for word in ("staging", "old"))
    for left in (staging, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        with told_when_full(place):
            staging.mkdir(parents=True)
            fill(staging)
            for path in staging.rglob("*"):
                flush(path)
    except Exception:
        shutil.rmtree(staging, ignore_errors=True)  # on a full disk it is in the way
        raise
    if place.exists():
        place.rename(old)
    staging.rename(place)
    flush(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def put_back(place: Path) -> None:
    """Undo the first rename of a `replace_folder` that was killed before its second one."""
    old = place.with_name(f".old-{place.name}")
    if old.is_dir() and not place.exists():
        old.rename(place)


def _published(parent: Path, prefix: str) -> Iterator[Path]:
    if parent.is_dir():
        yield from sorted(place for place in parent.glob(f"{prefix}*") if place.is_dir())
