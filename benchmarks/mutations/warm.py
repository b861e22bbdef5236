"""A process that has imported what the package and its tests import, and forks for each run of pytest.

Nothing of the package itself is imported before the fork, so each run reads the copy of the tree as it is then.
Importing torch and transformers takes longer than most bugs' tests. Run as a script by `planting.py`, which writes
a line of JSON for each run and reads one back; the package's own modules must not be imported here.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PACKAGE = "draftsmith"
_TESTS = ("pytest", "_pytest.assertion.rewrite", "hypothesis", "jsonschema")
_POLL = 0.02  # seconds


def main() -> None:
    """Answer runs until the input ends; asked for `--names`, say what the package imports."""
    if "--names" in sys.argv:
        print(json.dumps(imported_by_package()))
        return
    found = subprocess.run([sys.executable, "-P", __file__, "--names"], capture_output=True, text=True, check=True)
    for name in (*_TESTS, *json.loads(found.stdout.splitlines()[-1])):
        _import(name)
    for line in sys.stdin:
        print(json.dumps({"code": answered(json.loads(line))}), flush=True)


def imported_by_package() -> list[str]:
    """Every other module that is there once the package's own are, in the order in which imports began."""
    folders = importlib.import_module(PACKAGE).__path__
    for each in pkgutil.walk_packages(folders, f"{PACKAGE}."):
        parts = each.name.split(".")
        if parts[1] not in ("tests", "benchmarks") and parts[-1] != "__main__":
            _import(each.name)
    return [name for name in sys.modules if name.split(".")[0] not in (PACKAGE, "__main__")]


def _import(name: str) -> None:
    """What some machine lacks is imported by no test there."""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001
        print(f"{name}: {error}", file=sys.stderr)


def answered(asked: dict[str, Any]) -> int | None:
    """The exit code of pytest with these words, its output in the file; None where it took too long."""
    child = os.fork()
    if not child:
        _test(asked["words"], Path(asked["output"]))
    until = time.monotonic() + asked["limit"]
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _test(words: list[str], output: Path) -> None:
    """Of the forked process, which ends here."""
    os.setsid()
    code = 3  # pytest's own for an internal error
    try:
        with output.open("wb") as file:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        import pytest

        code = int(pytest.main(words))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
