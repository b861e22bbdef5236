"""Verbs of the command line one after another, of which those that are done are left out: a long way that goes on.

Read next: `../smollm2.py`, whose way it is; `kept.py`, which refuses other settings in the same folder.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from draftsmith.storage import write_text


class Stages:
    """Runs verbs one after another, and keeps which are done, with the seconds that each took over all sittings."""

    def __init__(self, out: Path) -> None:
        self.file, self.begun = out / "stages.json", 0
        self.seconds: dict[str, float] = json.loads(self.file.read_text()) if self.file.is_file() else {}

    def run(self, name: str, words: Sequence[str], *, about: float | None = None, done: Path | None = None) -> None:
        """Run a verb that is not done yet.

        Args:
            about: the seconds that it is thought to take.
            done: a file that is there when it was done before.

        Raises:
            SystemExit: it failed, or was stopped; its message, and how to go on, are printed.
        """
        if name in self.seconds and (done is None or done.exists()):
            return
        expected = "" if about is None else f", about {minutes(about)}"
        print(f"\n== {name}{expected}: draftsmith {shlex.join(words)}", flush=True)
        start = time.perf_counter()
        code = finished(["-m", "draftsmith.launch.cli", *words])
        self.keep(f"{name} (unfinished)" if code else name, time.perf_counter() - start)
        if code:
            print(f"== {name} was not finished; the same command goes on here", file=sys.stderr)
            raise SystemExit(code)

    def keep(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        write_text(self.file, json.dumps(self.seconds, indent=1) + "\n")

    def of(self, name: str) -> float:
        """Seconds of a stage, with those of sittings that were stopped."""
        return self.seconds.get(name, 0.0) + self.seconds.get(f"{name} (unfinished)", 0.0)


def finished(words: Sequence[str]) -> int:
    """The exit code of a Python of ours, which is told when we are to stop, and then saves what it has."""
    child = subprocess.Popen([sys.executable, *words])
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        return child.wait()
    except KeyboardInterrupt:  # the terminal told it too
        return child.wait() or 130
    finally:
        signal.signal(signal.SIGTERM, before)


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
