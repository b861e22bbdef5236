"""Processes that end at one chosen file operation under a folder, get a signal there, or find the disk full.

A copy of this process (`fork`) does the work. Its operations are counted: files opened to be written,
safetensors written, flushes, renames, deletions, folders made; and of every file its middle, where
the kernel ends the process at the write that would pass half of the file's size.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CRASHED = 77
_EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Point(NamedTuple):
    """An operation, by its number; with `half`, the middle of the file that it opens.

    With `full` the process goes on, and finds no room for a new file or folder from there on; with
    `signal` it is sent that one before the operation, and nothing else happens.
    """

    number: int
    what: str
    half: int | None = None
    full: bool = False
    signal: int | None = None


def points(folder: Path, act: Callable[[], Any]) -> list[Point]:
    """Every point at which `act` can be cut, found by doing it once in a copy of this process."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "seen.json"
        code = _forked(folder, act, None, report)
        assert code == 0, f"the work itself ended with {code}"
        found: list[Point] = []
        for number, (what, size) in enumerate(json.loads(report.read_text())):
            found.append(Point(number, what))
            if size > 1:
                found.append(Point(number, f"half of {what}", size // 2))
    return found


def crash(folder: Path, act: Callable[[], Any], point: Point) -> bool:
    """Do `act` in a copy of this process that ends at the point; whether it came to it."""
    code = _forked(folder, act, point, None)
    assert code in (0, CRASHED, -signal.SIGXFSZ), f"{point}: the work ended with {code} before its end"
    return code != 0


def fill_disk(folder: Path, act: Callable[[], int], point: Point) -> int:
    """The exit code of `act` where the disk is full from a point on."""
    return _forked(folder, act, point._replace(full=True), None)


def send(folder: Path, act: Callable[[], Any], point: Point, number: int) -> int:
    """The exit code of `act` where the process is sent signal `number` at a point."""
    return _forked(folder, act, point._replace(signal=number), None)


def run(act: Callable[[], Any]) -> int:
    """The exit code of a copy of this process that does `act`."""
    return _forked(None, act, None, None)


def _forked(folder: Path | None, act: Callable[[], Any], point: Point | None, report: Path | None) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        # what it says must not be cut by a limit on the size of files
        sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        watch = None if folder is None else _Watch(folder.resolve(), point)
        result = act()
        code = result if isinstance(result, int) else 0
        if watch is not None and report is not None:
            watch.active = False
            report.write_text(json.dumps(watch.sizes()))
    except BaseException:  # noqa: BLE001 - the copy must never go on as a second pytest
        code = 3
    finally:
        os._exit(code)


class _Watch:
    """Counts the operations of this process under a folder, and ends it at the point."""

    def __init__(self, folder: Path, point: Point | None) -> None:
        self.folder, self.point, self.active = str(folder), point, True
        self.seen: list[tuple[str, str | None]] = []
        self.largest: dict[int, int] = {}
        sys.addaudithook(self._audit)
        self._wrap(os, "fsync", lambda handle: ("flush", _of_handle(handle)))
        import draftsmith.storage.folder as folder_module
        import safetensors.torch as tensors

        self._wrap(folder_module, "swap", lambda one, other: ("swap", str(other)))
        self._wrap(tensors, "serialize_file", lambda _, path, *more: ("write", os.fspath(path)))

    def sizes(self) -> list[tuple[str, int]]:
        """Every operation, and the size that the file it opens will have."""
        self._look()
        return [(what, self.largest.get(number, 0)) for number, (what, _) in enumerate(self.seen)]

    def _wrap(self, owner: Any, name: str, tell: Callable[..., tuple[str, str]]) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            what, path = tell(*args)
            self._before(what, path, opens=what == "write")
            return real(*args, **more)

        setattr(owner, name, call)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open":
            path, mode, flags = args
            if not isinstance(path, int) and (flags or 0) & _WRITES:
                made = (flags or 0) & os.O_CREAT
                self._before("write" if made else "change", os.fsdecode(path), opens=True)
        elif event in _EVENTS and not isinstance(args[0], int):
            handle = next((each for each in args[1:] if isinstance(each, int) and each > 2), None)
            place = "" if handle is None or event in ("os.mkdir", "os.truncate") else f"{_of_handle(handle)}/"
            self._before(event.removeprefix("os."), place + os.fsdecode(args[0]))

    def _before(self, what: str, path: str, *, opens: bool = False) -> None:
        path = os.path.abspath(path)  # noqa: PTH100 - which opens nothing
        if not path.startswith(self.folder):
            return
        number = len(self.seen)
        if self.point is not None and self.point.full:
            if number >= self.point.number and what in ("write", "mkdir", "flush"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        elif self.point is not None and number == self.point.number:
            if self.point.signal is not None:
                os.kill(os.getpid(), self.point.signal)
            elif self.point.half is None:
                os._exit(CRASHED)
            else:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                size = self.point.half
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        self._look()
        self.seen.append((f"{what} {path.removeprefix(self.folder)}", path if opens else None))

    def _look(self) -> None:
        for number, (_, path) in enumerate(self.seen):
            if path is not None and os.path.isfile(path):  # noqa: PTH113
                self.largest[number] = max(self.largest.get(number, 0), os.stat(path).st_size)  # noqa: PTH116


def _of_handle(handle: int) -> str:
    return os.readlink(f"/proc/self/fd/{handle}")  # noqa: PTH115
