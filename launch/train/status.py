"""`status.json`: how a run ended, with its true exit code.

Launchers turn every code into 1; the file keeps the code. Read next: `run.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from ...errors import DraftsmithError
from ...storage import MACHINE_ERRNOS, write_text


class Status:
    """`status.json`: the true exit code, for launchers that turn every code into 1."""

    def __init__(self, out: Path) -> None:
        self._path = out / "status.json"
        self._active = os.environ.get("RANK", "0") == "0"

    def write(self, state: str, code: int | None, message: str = "") -> None:
        if self._active:
            write_text(self._path, _status_line(state, code, message))

    def fail(self, error: BaseException) -> None:
        """How the run ended, as the first process that fails tells it."""
        if self._is_told():
            return
        code = _exit_code(error)
        state = "stopped" if code == 75 else "failed"
        message = str(error) or type(error).__name__
        try:
            write_text(self._path, _status_line(state, code, message))
        except OSError:
            # a full disk has no room for a second file, but for a few words in the one there is
            with contextlib.suppress(OSError), self._path.open("r+", encoding="utf-8") as file:
                file.write(_status_line(state, code, message[:300]))
                file.truncate()

    def _is_told(self) -> bool:
        try:
            return bool(json.loads(self._path.read_text(encoding="utf-8"))["state"] == "failed")
        except (OSError, ValueError, KeyError):
            return False


def _status_line(state: str, code: int | None, message: str) -> str:
    return json.dumps({"state": state, "exit_code": code, "message": message}) + "\n"


def _exit_code(error: BaseException) -> int:
    """As `cli.main` returns it."""
    if isinstance(error, DraftsmithError):
        return error.exit_code
    if isinstance(error, OSError) and error.errno in MACHINE_ERRNOS:
        return 4
    return 130 if isinstance(error, KeyboardInterrupt) else 5
