"""One planted bug: which text of which file is replaced by what, and the tests that should notice.

Read next: `decoding.py`, `drafters.py`, `trainers.py`, `others.py`, `bugs/`, the bugs; `planting.py`,
which plants them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class Misplaced(ValueError):
    """The text that a mutation replaces is not there, or not once."""


@dataclass(frozen=True)
class Mutation:
    """A bug.

    Attributes:
        id: as in the study that planted it first; a letter for the room, `I` for one behind which a test passed
            for the wrong reason.
        file: where it goes, relative to the root.
        bug: what is done wrong.
        old, new: the text that is replaced, there exactly once, and what takes its place.
        tests: what pytest is given, of which one should fail: the narrowest tests that do, or a file of quick ones.
    """

    id: str
    file: str
    bug: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The folder of its file: `eval/tune`."""
        return Path(self.file).parent.as_posix()

    def planted_in(self, text: str) -> str:
        """The file's text with the bug.

        Raises:
            Misplaced: the code has changed; the message says how often the text was found.
        """
        count = text.count(self.old)
        if count != 1:
            raise Misplaced(f"{self.id}: the text to replace stands {count} times in {self.file}, expected once")
        return text.replace(self.old, self.new)
