"""A folder that one run holds from its beginning to its end.

The first process of a run locks `.lock` in the folder and writes a line that says who it is. A kill
gives the lock back and leaves the line, which is in nobody's way.

Which process of a launch this one is, by what launchers set; nothing is imported for it.

Read next: `staging.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import RequestError
from .files import writing
from .staging import this_host

_LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_PATIENCE = 2.0  # seconds: a process that was killed holds its lock until its memory is given back
_NETWORK = ("nfs", "cifs", "smb", "9p", "lustre", "ceph", "gluster", "beegfs", "gpfs", "sshfs", "s3fs", "gcsfuse")
_LOCAL = ("localhost", "127.0.0.1", "::1")
_log = logging.getLogger(__name__)
_held: set[IO[bytes]] = set()


class Holder(NamedTuple):
    """Who holds a folder, or held it last."""

    host: str
    pid: int
    since: str
    launch: str
    """What all processes of one launch have in common."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}" if self.pid else "a process that is starting"


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[bool]:
    """Keep other runs out of `folder` inside; yields whether that could be done.

    A file system without locks is named in the log.

    Raises:
        RequestError: another run holds the folder; the message says which process, where, since when.
        EnvironmentFailure: nobody may write there.
    """
    path = folder / _LOCK
    with writing(path):
        opened = path.open("ab+", buffering=0)
    with opened as file:
        locked = _lock(file, folder)
        _held.add(file)
        try:
            if locked:
                _write(file, json.dumps(_this()._asdict()))
            yield locked
        finally:
            _held.discard(file)
            if locked:
                _write(file, "")


def check_free(folder: Path) -> None:
    """Raise RequestError where a run is at work in the folder."""
    holder = holder_of(folder)
    if holder is not None:
        raise _in_use(folder, holder)


def holder_of(folder: Path) -> Holder | None:
    """Who holds the folder now; None where nobody does, or nobody can."""
    path = folder / _LOCK
    try:
        with path.open("rb") as file:
            is_held = not try_lock_shared(file)
    except OSError:
        return None
    return _read(path) if is_held else None


def launch() -> str:
    """What the processes of one launch have in common, and nobody else."""
    if rank() is None:
        return f"{this_host()}:{os.getpid()}"
    address = os.environ.get("MASTER_ADDR", "localhost")
    return f"{this_host() if address in _LOCAL else address}:{os.environ.get('MASTER_PORT')}"


def _this() -> Holder:
    return Holder(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z"), launch())


def _lock(file: IO[bytes], folder: Path) -> bool:
    """Lock the file, or say why not."""
    until = time.monotonic() + _PATIENCE
    try:
        while not try_lock(file):
            if time.monotonic() > until:
                raise _in_use(folder, _read(folder / _LOCK))
            time.sleep(0.05)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning(
            "%s is on a file system without locks (%s: %s), so nothing keeps a second run out: never start two there",
            folder,
            file_system(folder) or "of unknown kind",
            error.strerror,
        )
        return False
    kind = file_system(folder)
    if any(name in kind for name in _NETWORK):
        _log.info("%s is on %s: a run on another machine is kept out only if the server passes locks on", folder, kind)
    return True


def _in_use(folder: Path, holder: Holder) -> RequestError:
    return RequestError(f"{folder} is in use: {holder}, trains there. Wait for it or end it, or name another --out")


def _read(path: Path) -> Holder:
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Holder("", 0, "", "")  # it has not written its line yet


def _write(file: IO[bytes], line: str) -> None:
    # on a full disk the lock holds without a line
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(line.encode())


def try_lock(file: IO[Any]) -> bool:
    """Take an open file for this process until it is closed; False where another one has it.

    Raises:
        OSError: its file system has no locks.
    """
    import fcntl  # not there on every system

    return _try(file, fcntl.LOCK_EX)


def try_lock_shared(file: IO[Any]) -> bool:
    """The same, beside others that take it so: to ask whether a process has it for itself."""
    import fcntl

    return _try(file, fcntl.LOCK_SH)


def _try(file: IO[Any], kind: int) -> bool:
    import fcntl

    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except PermissionError as error:
        if error.errno != errno.EACCES:
            raise
        return False  # how SMB says that another process has it
    return True


def file_system(path: Path) -> str:
    """The kind of file system that a path is on, as the machine calls it; empty where it does not say."""
    import psutil

    whole = path.resolve()
    places = [each for each in psutil.disk_partitions(all=True) if whole.is_relative_to(each.mountpoint)]
    return str(max(places, key=lambda each: len(each.mountpoint)).fstype) if places else ""


def _forget() -> None:
    # a copy of this process must not keep the lock after it
    for file in _held:
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


# torch's launcher, MPICH and Intel MPI, Open MPI, MVAPICH2: those that accelerate takes
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def rank() -> str | None:
    """The number of this process in its launch; None where no launcher gives one."""
    return next((os.environ[name] for name in _RANKS if os.environ.get(name)), None)


def is_first() -> bool:
    """Whether this process speaks for its launch, or is alone."""
    return rank() in (None, "0")
