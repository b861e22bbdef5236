"""The format numbers of everything on disk.

A number is raised when what an older draftsmith wrote would be read wrongly, or the other way
round; then the old is refused with the reason, or made anew where it is a cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..errors import RequestError


class Format(NamedTuple):
    """One kind of file or folder, and the number that this version reads and writes."""

    kind: str
    number: int

    def check(self, number: object, path: Path, *, remedy: str) -> None:
        """Raise RequestError where the file `path` has another number."""
        if number != self.number:
            raise RequestError(f"{path}: its {self.kind} format is {number!r}, expected {self.number}; {remedy}")


MANIFEST_LIST = Format("manifest", 1)
"""Of a folder with a list of files and checksums: checkpoints, tokenised data."""
TOKENISED = Format("tokenised data", 2)
"""Raised too where the same source would give other rows: it is part of the cache's key."""
FEATURES = Format("feature cache", 1)
GENERATION = Format("generation", 1)
DATASTORE = Format("datastore", 1)
DRAFTER = Format("drafter", 1)
TREE = Format("tree", 1)
TUNED = Format("tuned setting", 1)
AUDIT = Format("audit", 1)
DETERMINISM = Format("determinism", 1)
ADAPTED = Format("adapted run", 1)
