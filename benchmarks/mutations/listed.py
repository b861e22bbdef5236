"""Bugs as lists in `bugs/`: what is replaced and by what, three lines each, as a diff has it.

    file eval/tune/profile.py
    tests tests/eval/tune/test_predictions.py

    PE20 break-even: plain decoding's time is of one row
    -measured.token_seconds * rows - call
    +measured.token_seconds - call

`file` and `tests` hold for all bugs below, up to the next. A line that begins with a minus or a plus is the text
behind the sign, to the blank; several are several lines. Read next: `mutation.py`, what a bug is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from draftsmith.benchmarks.mutations.mutation import Mutation

FOLDER = Path(__file__).parent / "bugs"


def listed() -> tuple[Mutation, ...]:
    """Those of every list, in the order of their names."""
    return tuple(bug for path in sorted(FOLDER.glob("*.txt")) for bug in read(path.read_text(encoding="utf-8")))


def read(text: str) -> Iterator[Mutation]:
    """The bugs of one list.

    Raises:
        ValueError: a bug replaces nothing, or stands in front of the first `file` and `tests`.
    """
    file, tests = "", ()  # type: str, tuple[str, ...]
    for part in text.split("\n\n"):
        heads = [line for line in part.split("\n") if line and line[0] not in "-+#"]
        old = [line[1:] for line in part.split("\n") if line.startswith("-")]
        new = [line[1:] for line in part.split("\n") if line.startswith("+")]
        for head in heads:
            word, _, rest = head.partition(" ")
            if word == "file":
                file, tests = rest, ()
            elif word == "tests":
                tests = tuple(rest.split())
            elif not old or not file or not tests:
                raise ValueError(f"{head!r} replaces nothing, or stands in front of its file and tests")
            else:
                yield Mutation(word, file, rest, "\n".join(old), "\n".join(new), tests)
