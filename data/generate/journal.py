"""The folder of a generation: a journal while it runs, whole files and one manifest at the end.

Every finished row is a line of the journal, flushed to disk before the next ones are asked for. A
kill may leave a line half written: it is cut off, and its rows are done anew. At the end the rows
are put in the order of the source into files that appear by a rename, then the manifest says so.
Read next: `answers.py` for what a line holds.
"""

from __future__ import annotations

import fcntl
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from ...errors import DataError, EnvironmentFailure, RequestError
from ...storage import flush, sha256, write_text

FORMAT = 1
MANIFEST = "manifest.json"
ANSWERS = "answers"
REJECTED = "rejected.jsonl"
_JOURNAL = ".journal.jsonl"  # hidden: a folder named as a data source passes it over
_SUMS = ("tokens", "turns", "cut", "retokenised", "steps", "emitted", "tested", "accepted")
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
        self._places: dict[int, tuple[int, str | None]] = {}
        self._file: BinaryIO | None = None
        self._session, self._extra = dict(session), tuple(extra)
        found = _read_manifest(folder)
        begun = {"format": FORMAT, "state": "running", **settings, "sessions": []}
        if found is not None:
            _check_same(folder, found, settings)
        self.manifest: dict[str, Any] = found or begun
        self.complete = self.manifest["state"] == "complete"

    def __enter__(self) -> Journal:
        if self.complete:
            self._check_files()
            return self
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = (self.folder / _JOURNAL).open("a+b")
            self._lock(self._file)
            for left in self.folder.glob(".staging-*"):
                left.unlink()
            self._record_session()
            self._recall()
        except OSError as error:
            raise self._failure(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError:
                # a full disk has been told already; closing tries to write once more
                if error is None:
                    raise

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def answered(self) -> int:
        """Rows that have an answer."""
        return sum(shape is not None for _, shape in self._places.values())

    def add(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Append entries of `Asker.entry` and wait until they are on the disk."""
        file = self._writable()
        file.seek(0, 2)
        at, lines = file.tell(), []
        for entry in entries:
            line = (json.dumps(entry) + "\n").encode()
            self._places[entry["row"]] = (at, entry.get("shape"))
            lines.append(line)
            at += len(line)
        if lines:
            try:
                file.write(b"".join(lines))
                file.flush()
                flush(self.folder / _JOURNAL)
            except OSError as error:
                raise self._failure(error) from error

    def publish(self) -> dict[str, Any]:
        """Write answers and rejected rows in the order of the source, then the manifest.

        Returns:
            The manifest.

        Raises:
            DataError: no row was answered; the rejected ones are listed on disk.
            EnvironmentFailure: the disk is full.
        """
        try:
            counts, rejected, files = self._write_files()
            if not counts["answered"]:
                raise DataError(self._nothing(rejected))
            self.manifest |= _finished(counts, rejected, files)
            self.manifest |= {name: {"rows": counts[name]} for name in self._extra}
            self._write_manifest()
            (self.folder / _JOURNAL).unlink()
        except OSError as error:
            raise self._failure(error) from error
        return self.manifest

    def _lock(self, file: BinaryIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise EnvironmentFailure(
                f"another process is generating into {self.folder}; wait for it, or end it"
            ) from error

    def _record_session(self) -> None:
        sessions = self.manifest["sessions"]
        if self._session in sessions:
            return
        if sessions:
            _log.warning(
                "%s was begun with other versions or hardware; both are in %s, and rows answered "
                "from here on may differ by a rounding",
                self.folder,
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
            self._places[entry["row"]] = (at, entry.get("shape"))
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
        found = {shape for _, shape in self._places.values()}
        shapes = found - {None}
        names = {shape: f"{ANSWERS}.jsonl" if len(shapes) == 1 else f"{ANSWERS}-{shape}.jsonl" for shape in shapes}
        counts: Counter[str] = Counter()
        rejected: Counter[str] = Counter()
        wanted = [*names.values(), *([REJECTED] if None in found else [])]
        wanted += [f"{name}.jsonl" for name in self._extra]
        drafts = {name: self.folder / f".staging-{name}" for name in wanted}
        streams = {name: path.open("w", encoding="utf-8") for name, path in drafts.items()}
        try:
            for number in sorted(self._places):
                entry = self._entry(number)
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
        finally:
            for stream in streams.values():
                stream.close()
        for name, path in drafts.items():
            flush(path)
            path.replace(self.folder / name)
        flush(self.folder)
        return counts, rejected, sorted(self.folder / name for name in drafts)

    def _entry(self, number: int) -> dict[str, Any]:
        file = self._writable()
        file.seek(self._places[number][0])
        return dict(json.loads(file.readline()))

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

    def _failure(self, error: OSError) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"cannot write to {self.folder} ({error.strerror or error}); what is done is kept: "
            "make room and run the same command again"
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
        found = json.loads(path.read_text(encoding="utf-8"))
        form, state = found["format"], found["state"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} is no manifest of a generation ({error}); name a new folder") from error
    if form != FORMAT or state not in ("running", "complete"):
        raise RequestError(f"{path} has format {form!r}; this version goes on with {FORMAT}")
    return dict(found)


def _check_same(folder: Path, manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Go on only with what the folder was begun with; the first other field is named."""
    # through JSON and back, as the manifest's values have been
    mine = flat(json.loads(json.dumps(settings)))
    found = flat({name: manifest.get(name) for name in settings})
    for name in sorted(mine | found):
        if mine.get(name) != found.get(name):
            raise RequestError(
                f"{folder} was begun with {name} {found.get(name)!r:.80}; now it is "
                f"{mine.get(name)!r:.80}. Repeat the first command to go on, or name a new folder"
            )


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested objects as one, names joined by dots."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    parts = (flat(each, f"{name}.{key}" if name else key) for key, each in value.items())
    return {key: each for part in parts for key, each in part.items()}


def _finished(counts: Counter[str], rejected: Counter[str], files: list[Path]) -> dict[str, Any]:
    """The end of the manifest: rows, tokens, acceptance where a drafter was at work, checksums."""
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
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files},
    }
