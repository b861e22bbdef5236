"""A file that one process holds at a time; a kill gives it back."""

from __future__ import annotations

from typing import IO, Any


def try_lock(file: IO[Any]) -> bool:
    """Take an open file for this process until it is closed; False where another one has it."""
    import fcntl  # not there on every system

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
