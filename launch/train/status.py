"""`status.json`: how a run ended, with its true exit code.

Launchers turn every code into 1; the file keeps the code. Read next: `run.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from ...errors import DraftsmithError
from ...storage import MACHINE_ERRNOS, holder_of, is_first, write_text
from ...storage.held import launch


class Status:
    """`status.json`: the true exit code, for launchers that turn every code into 1."""

    def __init__(self, out: Path) -> None:
        self._out, self._path = out, out / "status.json"
        # libraries may set what a launcher sets while the process runs
        self._active, self._launch = is_first(), launch()

    def write(self, state: str, code: int | None, message: str = "") -> None:
        if self._active:
            write_text(self._path, self._line(state, code, message))

    def fail(self, error: BaseException) -> None:
        """How the run ended, as the first process that fails tells it."""
        if self._is_told() or self._is_of_others():
            return
        code = _exit_code(error)
        state = "stopped" if code == 75 else "failed"
        message = str(error) or type(error).__name__
        try:
            write_text(self._path, self._line(state, code, message))
        except OSError:
            # a full disk has no room for a second file, but for a few words in the one there is
            with contextlib.suppress(OSError), self._path.open("r+", encoding="utf-8") as file:
                file.write(self._line(state, code, message[:300]))
                file.truncate()

    def _is_of_others(self) -> bool:
        """Whether another launch is at work in the folder, and this one's first process was refused there."""
        holder = holder_of(self._out)
        return holder is not None and holder.pid != os.getpid() and holder.launch not in ("", self._launch)

    def _is_told(self) -> bool:
        """Whether another process of this launch has said how it ended; an earlier launch's word is stale."""
        try:
            told = json.loads(self._path.read_text(encoding="utf-8"))
            return told["state"] in ("failed", "stopped") and told["launch"] == self._launch
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _line(self, state: str, code: int | None, message: str) -> str:
        return json.dumps({"state": state, "exit_code": code, "message": message, "launch": self._launch}) + "\n"


def _exit_code(error: BaseException) -> int:
    """As `cli.main` returns it."""
    if isinstance(error, DraftsmithError):
        return error.exit_code
    if isinstance(error, OSError) and error.errno in MACHINE_ERRNOS:
        return 4
    return 130 if isinstance(error, KeyboardInterrupt) else 5
