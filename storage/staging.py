"""Names for what is being written, each process with its own, and what dead processes have left of it.

`.staging-MACHINE-PID-NAME` is not yet NAME, `.old-MACHINE-PID-NAME` no longer. Two processes that
write the same name do not meet, and who comes later can tell what nobody is writing any more.
Read next: `folder.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
from functools import cache
from pathlib import Path

_NAMED = re.compile(r"\.(?:staging|old)-(?P<host>[\w.]+)-(?P<pid>\d+)-(?P<name>.+)", re.DOTALL)


@cache
def this_host() -> str:
    """Where process numbers mean what they do here: the machine's name, in letters that file names may have,
    and eight digits for what the name does not tell: its end, this start of the machine, this container."""
    name = socket.gethostname()
    parts = [name, *map(_read, ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"))]
    mark = hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:8]
    readable = re.sub(r"[^\w.]", "_", name, flags=re.ASCII)[:24] or "host"
    return f"{readable}.{mark}"


def _read(path: str) -> str:
    """What a file holds or a link names; empty where the system has none or does not say."""
    try:
        return str(Path(path).readlink()) if Path(path).is_symlink() else Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


def staging_of(path: Path) -> Path:
    """Where this process writes `path` before it appears."""
    return path.with_name(f".staging-{this_host()}-{os.getpid()}-{path.name}")


def replaced_of(path: Path) -> Path:
    """Where this process puts what was at `path`, until the new one is there."""
    return path.with_name(f".old-{this_host()}-{os.getpid()}-{path.name}")


def restore_folder(path: Path) -> None:
    """Put a folder back that was moved aside by a process that died before the new one was there."""
    moved = [each for each in path.parent.glob(".old-*") if _name(each) == path.name and not is_living(each)]
    if moved and not os.path.lexists(path):
        max(moved, key=lambda each: each.stat().st_mtime).rename(path)


def delete_leftovers(parent: Path, name: str | None = None, *, alone: bool = False) -> None:
    """Delete what dead processes have staged in `parent`, or moved aside there, and bring back what it was.

    Args:
        name: of this file or folder alone.
        alone: nobody on another machine writes there, so what they have staged is left over too.
    """
    for left in [*parent.glob(".staging-*"), *parent.glob(".old-*")]:
        own = _name(left)
        if own is None or (name is not None and own != name) or is_living(left, elsewhere=not alone):
            continue
        if left.name.startswith(".old-"):
            restore_folder(left.with_name(own))
        remove(left)


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder; what cannot be deleted stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def is_living(staged: Path, *, elsewhere: bool = False) -> bool:
    """Whether another process that lives staged this.

    Args:
        elsewhere: what to take for true of other machines' processes.
    """
    match = _NAMED.fullmatch(staged.name)
    if match is None or match["host"] != this_host():
        return elsewhere
    pid = int(match["pid"])
    return pid != os.getpid() and _is_running(pid)


def _is_running(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _name(staged: Path) -> str | None:
    match = _NAMED.fullmatch(staged.name)
    return None if match is None else match["name"]
