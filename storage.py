"""Files that are whole or not there: flushing, checksums, replacing a small file at once.

Any room may use it, like `errors.py`. Read next: `trainers/checkpoint.py`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Checksum of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replace a small file whole: no reader ever sees half of it, and processes may race."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".staging-{os.getpid()}-{path.name}")
    staging.write_text(text, encoding="utf-8")
    flush(staging)
    staging.replace(path)
