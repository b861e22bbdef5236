"""Parts of the plan for a GPU as processes: run to their end or that of their time, noted, shown.

The standard library alone: the machine's Python may lack the rest until wheels stand in for it.
Read next: `../gpu.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
UNUSABLE = 75
"""Exit code of a process whose device answers no more."""
LAST_LINES = 40
MOST_CHARACTERS = 11_000
"""Of the table of all figures: whoever started the run may be shown the last 12,000 alone."""
MOST_OF_A_RECORD = 1_250


@dataclass(frozen=True)
class Part:
    """A process, its arguments behind `python`, the most seconds that it may take, and its sections."""

    name: str
    words: tuple[str, ...]
    seconds: float
    sections: tuple[str, ...] = ()


@dataclass
class Went:
    """How a part went."""

    part: str
    outcome: str
    """`passed`, `failed (...)` or `late`."""
    seconds: float
    end: str
    """The last line that it printed."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """A row for each section, or one."""


def run(part: Part, out: Path, surroundings: dict[str, str], *, within: float, tiny: bool = False) -> Went:
    """A part to its end, or to that of its time; what it prints is kept in a log and shown.

    Of sections, those behind one that took its process along run in another. Where the device was left unusable, or
    the process was killed by what it did, that one is tried again without kernels of our own.
    """
    began = time.monotonic()
    until = began + min(part.seconds, within) if not tiny else began + within
    log = out / f"gpu-{part.name}.log"
    log.write_bytes(b"")
    left = list(part.sections)
    safe: list[str] = []
    while True:
        record = (out / f"gpu-{part.name}.json").resolve()
        words = [sys.executable, *part.words]
        if part.sections:
            words += ["--out", str(out.resolve()), "--sections", ",".join(left), *(["--tiny"] if tiny else []), *safe]
        else:
            record.unlink(missing_ok=True)  # of an earlier run
            words += ["--json", str(record)]
        outcome, code = _to_its_end(words, log, surroundings, until - time.monotonic())
        known = _progress(out)
        behind = [name for name in left if name not in known]
        if outcome in ("passed", "late") or behind == left:
            break
        if not safe and (code == UNUSABLE or code < 0):
            behind.insert(0, next(name for name in reversed(left) if name in known))
            safe = ["--torch-alone"]
        if not behind:
            break
        left = behind
    seconds = time.monotonic() - began
    rows = [_section_row(name, _progress(out), outcome) for name in part.sections]
    if not part.sections:
        written = record.name if record.is_file() else None
        rows = [{"part": part.name, "outcome": outcome, "seconds": seconds, "record": written}]
    elif outcome != "late":
        bad = [row["part"] for row in rows if row["outcome"] != "passed"]
        outcome = f"failed ({', '.join(bad)})" if bad else "passed"
    print(f"gpu: {part.name}: {outcome}, {seconds:.0f} s", flush=True)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Went(part.name, outcome, seconds, lines[-1][:120] if lines else "", rows)


def _to_its_end(words: list[str], log: Path, surroundings: dict[str, str], seconds: float) -> tuple[str, int]:
    """How a process and all that it began ended, and its exit code; its lines go to the log and to where ours go."""
    if seconds <= 0:
        return "late", 0
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Event()

    def kill() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        with log.open("a", encoding="utf-8") as stream:
            for line in process.stdout or ():
                stream.write(line)
                stream.flush()
                print(line, end="", flush=True)
        code = process.wait()
    finally:
        timer.cancel()
    if late.is_set():
        return "late", code
    return "passed" if code == 0 else f"failed (exit code {code})", code


def _progress(out: Path) -> dict[str, Any]:
    path = out / "progress.json"
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return known


def _section_row(name: str, progress: dict[str, Any], outcome: str) -> dict[str, Any]:
    known = progress.get(name)
    if known is None:
        return {"part": name, "outcome": f"not begun: {outcome}"}
    if known["outcome"] == "begun":
        known = known | {"outcome": "cut off"}
    return {"part": name, **known}


# ---- packages ----------------------------------------------------------------------------------


def add_wheels(wheels: Path, place: Path) -> Path:
    """A folder of what the wheels hold."""
    more = place / "wheels"
    words = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(more)]
    # wheels of another Python are refused by pip, which says so; what is still missing is named behind it
    subprocess.run([sys.executable, "-m", "pip", *words, *map(str, sorted(wheels.glob("*.whl")))], check=False)
    return more


def answer_of(code: str, surroundings: dict[str, str]) -> str:
    """The last line that some code prints in the environment of the parts."""
    done = subprocess.run([sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, check=True)
    return (done.stdout.splitlines() or [""])[-1].strip()


# ---- showing -----------------------------------------------------------------------------------


def ends_of(log: Path) -> str:
    """The last lines of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return "\n".join(line[:160] for line in lines[-LAST_LINES:])


def compact(out: Path, went: list[Went]) -> str:
    """How everything went, and every figure that is there, a line for each row."""
    lines = []
    for row in (row for each in went for row in each.rows):
        lines.append(f"{row['part']}: {row['outcome']}, {row.get('seconds') or 0:.1f} s")
        record = out / (row.get("record") or "none")
        if record.is_file():
            figures = lines_of(json.loads(record.read_text(encoding="utf-8")))
            lines.append(_cut("\n".join(f"  {line}" for line in figures), MOST_OF_A_RECORD))
    return _cut("\n".join(lines), MOST_CHARACTERS)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}\n  ... the rest is in the record"


def lines_of(record: dict[str, Any]) -> list[str]:
    """A record's rows without their names, and its notes."""
    formats = record.get("formats", {})
    lines = []
    for row in record.get("rows", []):
        cells = [_text(cell, formats.get(name, "")) for name, cell in row.items() if name != "part" and cell != ""]
        lines.append(" | ".join(cells)[:170])
    return lines + [f"! {note[:150]}" for note in record.get("notes", [])]


def _text(cell: Any, form: str) -> str:
    if cell is None:
        return "-"
    return format(cell, form) if isinstance(cell, (int, float)) else str(cell)


# ---- a rehearsal -------------------------------------------------------------------------------


def copied_checkout(root: Path, to: Path) -> Path:
    """A copy as another machine is given it: the files that git does not ignore, without git; wheels by a link."""
    words = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, listed):
        if (root / name).is_file():  # one may be deleted, and not yet from git
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name, follow_symlinks=False)
    if (root / ".wheels").is_dir():
        (to / ".wheels").symlink_to((root / ".wheels").resolve())
    return to


def problems_in(out: Path, parts: list[str]) -> list[str]:
    """What a run has lost: parts that did not pass, records that are not there, arms that failed."""
    if not (out / "gpu.json").is_file():
        return [f"{out / 'gpu.json'} was not written"]
    rows = {row["part"]: row for row in json.loads((out / "gpu.json").read_text(encoding="utf-8"))["rows"]}
    problems = []
    for name in parts:
        row = rows.get(name, {"outcome": "not there"})
        record = out / (row.get("record") or "none")
        if row["outcome"] != "passed":
            problems.append(f"{name}: {row['outcome']}")
        if not record.is_file():
            problems.append(f"{name}: no record")
            continue
        notes = json.loads(record.read_text(encoding="utf-8")).get("notes", [])
        problems += [f"{name}: {note}" for note in notes if re.search(r"\w+(Error|Failure|Exception): ", note)]
    return problems
