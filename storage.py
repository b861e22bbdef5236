"""Files that are whole or not there: flushing, checksums, replacing a small file at once.

What comes from elsewhere may be damaged all the same: tensors are read here, so that each such file
is told of in the same words. Any room may use it, like `errors.py`; torch is imported where tensors
are read. Read next: `trainers/loop/checkpoint.py`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import DraftsmithError, EnvironmentFailure, RequestError

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)
OF_THE_MACHINE = frozenset({*_FULL, errno.EROFS, errno.EACCES, errno.EPERM})
"""What an OSError says where the machine has no room or gives no right: no fault of the program."""


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
    try:
        staging.write_text(text, encoding="utf-8")
        flush(staging)
        staging.replace(path)
    except OSError:
        staging.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def told_when_full(place: Path) -> Iterator[None]:
    """Inside, a full disk is an EnvironmentFailure that says what to do.

    Args:
        place: where something is written, there already or not.
    """
    try:
        yield
    except Exception as error:
        if not _says_full(error):
            raise
        there = next(each for each in (place, *place.absolute().parents) if each.exists())
        free = shutil.disk_usage(there).free / 1e6
        raise EnvironmentFailure(
            f"a disk is full ({error}); {free:.0f} MB are free at {place}. What was complete "
            "before is intact: make room, then run the same command again"
        ) from error


def _says_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    # tokenizers and safetensors, which are written in Rust, have the number in their words alone
    outside = not isinstance(error, DraftsmithError)
    return outside and any(f"(os error {number})" in str(error) for number in _FULL)


def writable_folder(path: Path) -> Path:
    """The same path, once tried: to be asked before the work whose result goes there.

    Nothing is left behind, a folder neither: what is tried is the nearest one that is there.

    Raises:
        RequestError: a file is in the way. EnvironmentFailure: nobody may write there.
    """
    whole = path.absolute()
    there = next(each for each in (whole, *whole.parents) if os.path.lexists(each))
    if not there.is_dir():
        raise RequestError(f"{path} cannot be a folder: {there} is a file; name another folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot write to {path} ({error.strerror or error}, tried in {there}); name another "
            "folder, or make room or a right to write there"
        ) from error
    return path


def read_tensors(path: Path, *, remedy: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Args:
        remedy: what to do where it cannot be read, the last words of the message.

    Raises:
        RequestError: it is missing or damaged.
    """
    from safetensors.torch import load_file

    with _told(path, remedy):
        return load_file(path)


def check_tensors(path: Path, *, remedy: str) -> None:
    """Raise RequestError where `read_tensors` would; the header alone is read."""
    from safetensors import safe_open

    # the header says how long the file is, so one that was cut shows here
    with _told(path, remedy), safe_open(path, "pt"):
        pass


def derived_tensors(path: Path, shapes: Mapping[str, tuple[int | None, ...]]) -> dict[str, Tensor] | None:
    """The tensors of a file that can be made anew: None where it has to be.

    A file that is there and damaged, or holds other tensors, is named in the log.

    Args:
        shapes: of the tensors that are expected, None being any size.
    """
    if not path.is_file():
        return None
    try:
        found = read_tensors(path, remedy="it is made anew")
    except RequestError as error:
        _log.warning("%s", error)
        return None
    held = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if held.keys() == shapes.keys() and all(_fits(held[name], shapes[name]) for name in shapes):
        return found
    _log.warning("%s holds %s, expected %s; it is made anew", path, held, dict(shapes))
    return None


def _fits(held: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(held) == len(expected) and all(
        wanted in (None, size) for size, wanted in zip(held, expected, strict=True)
    )


@contextlib.contextmanager
def _told(path: Path, remedy: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        size = f"{path.stat().st_size:,} bytes" if path.is_file() else "no file"
        raise RequestError(
            f"{path} ({size}) cannot be read: {error}. Expected a whole safetensors file: {remedy}"
        ) from error
