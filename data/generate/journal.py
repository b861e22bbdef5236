"""The folder of a generation: a journal while it runs, whole files and one manifest at the end.

Every finished row is a line of the journal, flushed to disk before the next ones are asked for. A
kill may leave a line half written: it is cut off, and its rows are done anew. At the end the rows
are put in the order of the source into files that appear by a rename; then the manifest is marked complete.
Read next: `answers.py` for what a line holds.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TextIO

from ...errors import DataError, EnvironmentFailure, RequestError
from ...storage import MANIFEST, check_identity, checksums, flush, sha256, staged_file, try_lock, write_text, writing
from ...storage.formats import GENERATION
from ...storage.identity import flat
from .progress import Progress

ANSWERS = "answers"
REJECTED = "rejected.jsonl"
_JOURNAL = ".journal.jsonl"  # hidden: a folder named as a data source passes it over
_SUMS = ("tokens", "turns", "cut", "retokenised", "steps", "emitted", "tested", "accepted")
_MOST_NAMED = 4  # changes of a session that are named
_log = logging.getLogger(__name__)


class Journal:
    """Rows done so far, by their number in the source; use it as a context."""

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], session: Mapping[str, Any], extra: Sequence[str] = ()
    ) -> None:
        """Begin `folder`, or go on in it.

        Args:
            settings: all that shapes the answers; JSON. A folder goes on with these alone.
            session: what this process runs on (versions, hardware); recorded whenever it changes.
            extra: lists of rows that entries hold beside their answer; each gets a file of its own.

        Raises:
            RequestError: the folder was begun with other settings, or holds something else.
            EnvironmentFailure: on entering: it cannot be written, or another process is at work
            in it.
        """
        self.folder = folder
        self._offsets: dict[int, tuple[int, str | None]] = {}
        self._file: BinaryIO | None = None
        self._session, self._extra = dict(session), tuple(extra)
        self.progress: Progress | None = None
        """Is told of every row that is added."""
        earlier = _read_manifest(folder)
        begun = {"format": GENERATION.number, "state": "running", **settings, "sessions": []}
        if earlier is not None:
            remedy = "Repeat the first command to go on, or name a new folder"
            check_identity(folder, earlier, settings, remedy=remedy)
        self.manifest: dict[str, Any] = earlier or begun
        self.complete = self.manifest["state"] == "complete"

    def __enter__(self) -> Journal:
        if self.complete:
            self._check_files()
            return self
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = (self.folder / _JOURNAL).open("a+b")
            self._lock(self._file)
            for left in self.folder.glob(".staging-*"):
                left.unlink()
            self._record_session()
            self._recall()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError:
                # a full disk has been reported already; closing tries to write once more
                if error is None:
                    raise

    def __contains__(self, number: int) -> bool:
        return number in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def answered(self) -> int:
        """Rows that have an answer."""
        return sum(shape is not None for _, shape in self._offsets.values())

    def add(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Append entries of `Asker.entry` and wait until they are on the disk."""
        file = self._writable()
        file.seek(0, 2)
        at, lines = file.tell(), []
        found: dict[int, tuple[int, str | None]] = {}
        for entry in entries:
            line = (json.dumps(entry) + "\n").encode()
            found[entry["row"]] = (at, entry.get("shape"))
            lines.append(line)
            at += len(line)
            if self.progress is not None:
                self.progress.add(entry)
        if lines:
            with writing(self.folder):
                file.write(b"".join(lines))
                file.flush()
                flush(self.folder / _JOURNAL)
        self._offsets |= found
        if self.progress is not None:
            self.progress.tell()

    def settle(self, name: str, value: Any, remedy: str) -> None:
        """Keep in the manifest what only asking shows; a folder goes on with the same alone.

        Args:
            value: JSON.
            remedy: with what the folder would go on.

        Raises:
            RequestError: its rows so far were answered otherwise.
        """
        there = self.manifest.setdefault(name, value)
        if there != value:
            raise RequestError(
                f"{self.folder}: {name} was {_listed(there)} for the rows so far and is {_listed(value)} now, "
                f"which makes other answers. Go on with {remedy}, or name a new folder"
            )
        self._write_manifest()

    def entry(self, number: int) -> dict[str, Any]:
        """The entry of a row that is done."""
        file = self._writable()
        file.seek(self._offsets[number][0])
        return dict(json.loads(file.readline()))

    def publish(self) -> dict[str, Any]:
        """Write answers and rejected rows in the order of the source, then the manifest.

        Returns:
            The manifest.

        Raises:
            DataError: no row was answered; the rejected ones are listed on disk.
            EnvironmentFailure: the disk is full.
        """
        with writing(self.folder):
            counts, rejected, files = self._write_files()
            if not counts["answered"]:
                raise DataError(self._nothing(rejected))
            self.manifest |= _finished(counts, rejected) | {"files": checksums(files, self.folder)}
            self.manifest |= {name: {"rows": counts[name]} for name in self._extra}
            self._write_manifest()
            (self.folder / _JOURNAL).unlink()
        return self.manifest

    def _lock(self, file: BinaryIO) -> None:
        if not try_lock(file):
            file.close()
            raise EnvironmentFailure(f"another process is generating into {self.folder}; wait for it, or end it")

    def _record_session(self) -> None:
        sessions = self.manifest["sessions"]
        if self._session in sessions:
            return
        if sessions:
            _log.warning(
                "%s: %s; both are in %s, and rows answered from here on may differ by a rounding",
                self.folder,
                _changes(sessions[-1], self._session),
                MANIFEST,
            )
        sessions.append(self._session)
        self._write_manifest()

    def _write_manifest(self) -> None:
        write_text(self.folder / MANIFEST, json.dumps(self.manifest, indent=1) + "\n")
        flush(self.folder)

    def _recall(self) -> None:
        """Find the rows that are done; whatever a kill left behind the last whole line goes."""
        file = self._writable()
        file.seek(0)
        at = 0
        for line in file:
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                entry = None
            if not isinstance(entry, dict) or "row" not in entry:
                break
            self._offsets[entry["row"]] = (at, entry.get("shape"))
            at += len(line)
        file.seek(0, 2)
        if file.tell() > at:
            _log.warning("%s: a line was cut off; its rows are done anew", self.folder)
            file.truncate(at)

    def _writable(self) -> BinaryIO:
        assert self._file is not None, "a journal is used inside `with`"
        return self._file

    def _write_files(self) -> tuple[Counter[str], Counter[str], list[Path]]:
        """Rows go to a file; where they have several shapes, to one for each."""
        every = {shape for _, shape in self._offsets.values()}
        shapes = every - {None}
        names = {shape: f"{ANSWERS}.jsonl" if len(shapes) == 1 else f"{ANSWERS}-{shape}.jsonl" for shape in shapes}
        counts: Counter[str] = Counter()
        rejected: Counter[str] = Counter()
        files = [*names.values(), *([REJECTED] if None in every else [])]
        files += [f"{name}.jsonl" for name in self._extra]
        with ExitStack() as stack:
            streams = {name: stack.enter_context(_staged_stream(self.folder / name)) for name in files}
            for number in sorted(self._offsets):
                entry = self.entry(number)
                if "rejected" in entry:
                    rejected[entry["rejected"]["kind"]] += 1
                    streams[REJECTED].write(json.dumps(entry["rejected"]) + "\n")
                else:
                    counts.update({name: entry[name] for name in _SUMS}, answered=1)
                    row = json.dumps(entry["answer"], ensure_ascii=False)
                    streams[names[entry["shape"]]].write(row + "\n")
                    for name in self._extra:
                        counts[name] += len(entry[name])
                        streams[f"{name}.jsonl"].writelines(json.dumps(each) + "\n" for each in entry[name])
        flush(self.folder)
        return counts, rejected, sorted(self.folder / name for name in files)

    def _check_files(self) -> None:
        """A finished folder is left as it is; one whose files were changed is not passed over."""
        for name, entry in self.manifest["files"].items():
            path = self.folder / name
            if not path.is_file() or sha256(path) != entry["sha256"]:
                raise DataError(f"{path} is missing or is not what {MANIFEST} describes; generate into a new folder")
        (self.folder / _JOURNAL).unlink(missing_ok=True)

    def _nothing(self, rejected: Counter[str]) -> str:
        if not rejected:
            return "the source holds no row"
        path = self.folder / REJECTED
        first = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
        return (
            f"none of {rejected.total():,} rows was answered; the first one, "
            f"{first['file']}:{first['line']}: {first['reason']}. All are listed in {path}"
        )


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder begun earlier; None where there is nothing yet."""
    path = folder / MANIFEST
    if not path.exists():
        # a kill before the first manifest leaves hidden files alone
        if folder.is_dir() and any(not each.name.startswith(".") for each in folder.iterdir()):
            raise RequestError(f"{folder} holds files, but no {MANIFEST} of a generation; name a new folder")
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        number, state = manifest["format"], manifest["state"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} is no manifest of a generation ({error}); name a new folder") from error
    GENERATION.check(number, path, remedy="name a new folder")
    if state not in ("running", "complete"):
        raise RequestError(f"{path}: its state is {state!r}, expected running or complete; name a new folder")
    return dict(manifest)


def template_of(folder: Path) -> dict[str, Any]:
    """What the chat template of a folder begun earlier was told: its variables, and the day of its clock."""
    return dict((_read_manifest(folder) or {}).get("template") or {})


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What this session has otherwise than the one before, by name and with both values."""
    there, here = flat(dict(before)), flat(json.loads(json.dumps(now)))
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    listed = [f"{name} was {there.get(name)} and is {here.get(name)} now" for name in names]
    return "; ".join(
        [*listed[:_MOST_NAMED], *([f"and {len(names) - _MOST_NAMED} more"] if listed[_MOST_NAMED:] else [])]
    )


def _listed(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


@contextmanager
def _staged_stream(path: Path) -> Iterator[TextIO]:
    """A text file to write to, which appears as `path` at the end."""
    with staged_file(path) as staging, staging.open("w", encoding="utf-8") as stream:
        yield stream


def _finished(counts: Counter[str], rejected: Counter[str]) -> dict[str, Any]:
    """The end of the manifest: rows, tokens, acceptance where a drafter was at work."""
    drafted = None
    if counts["steps"]:
        drafted = {
            "tau": counts["emitted"] / counts["steps"],
            "alpha": counts["accepted"] / counts["tested"] if counts["tested"] else None,
            "steps": counts["steps"],
            "verdict": "not audited",
        }
    return {
        "state": "complete",
        "rows": {
            "answered": counts["answered"],
            "rejected": rejected.total(),
            "rejected_by_kind": dict(sorted(rejected.items())),
        },
        "answers": {name: counts[name] for name in ("turns", "tokens", "cut", "retokenised")},
        "acceptance": drafted,
    }
