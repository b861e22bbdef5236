"""A file that one process holds at a time; a kill gives it back. Read next: `held.py`."""

from __future__ import annotations

import errno
from typing import IO, Any


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
