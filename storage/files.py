"""One file that is whole or not there, and the errors where nothing can be written.

Read next: `folder.py`, the same for a folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError, EnvironmentFailure, RequestError
from .staging import staging_of

AGAIN = "run the same command again"
_FULL = (errno.ENOSPC, errno.EDQUOT)
MACHINE_ERRNOS = frozenset({*_FULL, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM})
"""Of an OSError where the machine has no room or gives no right: no fault of the program."""
_LONGEST_NAME = 200  # bytes; systems allow 255, and what is staged has a longer name


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


def shared_mode() -> int:
    """The mode that the process's umask gives to new files."""
    umask = os.umask(0)  # it can only be read by setting it
    os.umask(umask)
    return 0o666 & ~umask


@contextlib.contextmanager
def staged_file(path: Path, *, staging: Path | None = None, durable: bool = True) -> Iterator[Path]:
    """A path beside `path` to write to; on leaving, what is there replaces `path` at once.

    No reader ever sees half a file, and after an error nothing of it is left.

    Args:
        staging: where to write; by default a name of this process, so that processes may race.
        durable: wait for the disk before the file appears. Without, a power cut may tear it: for
            files that carry a checksum and can be made again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = staging or staging_of(path)
    try:
        yield staging
        if durable:
            flush(staging)
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def json_lines(path: Path) -> Iterator[Any]:
    """The values of a file of JSON lines. Only a line end of a file ends one: a text may hold U+2028 as it is."""
    with path.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def write_text(path: Path, text: str) -> None:
    """Replace a small text file at once; its folder is made."""
    with staged_file(path) as staging:
        staging.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def explain_full_disk(path: Path, *, room: str = "make room", again: str = AGAIN) -> Iterator[None]:
    """Inside, a full disk, or a limit on files' sizes, is an EnvironmentFailure with what to do; other errors pass.

    Args:
        path: what is written, there already or not.
        room: how to make room.
        again: what to do after that.
    """
    try:
        yield
    except Exception as error:
        if system_error(error) == errno.EFBIG:
            raise EnvironmentFailure(
                f"cannot write {path}: {_reason(error)}. A limit on the size of a file is reached, that of the shell "
                f"(ulimit -f) or of the file system; what was complete before is intact: raise it, then {again}"
            ) from error
        if system_error(error) not in _FULL:
            raise
        free = shutil.disk_usage(nearest_folder(path)).free / 1e6
        raise EnvironmentFailure(
            f"cannot write {path}, a disk is full there: {_reason(error)}; {free:.0f} MB are free. "
            f"What was complete before is intact: {room}, then {again}"
        ) from error


@contextlib.contextmanager
def writing(path: Path, *, room: str = "make room", again: str = AGAIN) -> Iterator[None]:
    """Inside, an error of the system is an EnvironmentFailure: `path` cannot be written, and what to do."""
    try:
        with explain_full_disk(path, room=room, again=again):
            yield
    except Exception as error:
        if system_error(error) is None:
            raise
        raise EnvironmentFailure(
            f"cannot write {path}: {_reason(error)}. What was complete before is intact: mend that, then {again}"
        ) from error


def _reason(error: Exception) -> str:
    """The system's message, and the file that it is about."""
    file = getattr(error, "filename", None)
    reason = str(getattr(error, "strerror", None) or error)
    return f"{reason} ({file})" if file else reason


def system_error(error: BaseException) -> int | None:
    """The number of an error of the operating system; None for any other error."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    # tokenizers and safetensors, which are written in Rust, have the number in their message alone
    number = re.search(r"\(os error (\d+)\)", str(error))
    return int(number[1]) if number and not isinstance(error, DraftsmithError) else None


def nearest_folder(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    whole = path.absolute()
    return next(each for each in (whole, *whole.parents) if os.path.lexists(each))


def check_name(path: Path) -> None:
    """Raise RequestError for a path that nothing new can have."""
    if "\0" in str(path):
        raise RequestError(f"{str(path)!r} holds a NUL character; name another folder")
    if os.path.lexists(path):
        return
    longest = max(map(os.fsencode, path.parts), key=len, default=b"")
    if len(longest) > _LONGEST_NAME or len(os.fsencode(path.absolute())) > 4000:
        raise RequestError(
            f"{str(path)[:60]}... has {len(str(path)):,} letters, {len(longest):,} bytes in one name; expected "
            f"names of at most {_LONGEST_NAME}, and 4,000 in all: name another folder"
        )


def writable_folder(path: Path) -> Path:
    """The same path, once tried: to be asked before the work whose result goes there.

    Nothing is left behind, a folder neither: what is tried is the nearest one that is there.

    Raises:
        RequestError: a file is in the way, or there can be no such name. EnvironmentFailure: nobody may write there.
    """
    check_name(path)
    nearest = nearest_folder(path)
    if not nearest.is_dir():
        raise RequestError(f"{path} cannot be a folder: {nearest} is a file; name another folder")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot write to {path} ({error.strerror or error}, tried in {nearest}); name another "
            "folder, or make room or a right to write there"
        ) from error
    return path
