"""What became of bugs, kept beside the tree, so that hours of planting may be stopped and go on.

Read next: `planting.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.benchmarks.common.passed_tests import digest_of, lines_of
from draftsmith.benchmarks.mutations.mutation import Mutation
from draftsmith.benchmarks.mutations.planting import Outcome


@dataclass(frozen=True)
class Kept:
    """Outcomes of one tree; those of other trees stand in the same file."""

    path: Path
    digest: str
    """Of everything in the tree."""

    @classmethod
    def of(cls, tree: Path, path: Path) -> Kept:
        """Those of a copy of the tree, before anything is planted in it."""
        return cls(
            path, digest_of(tree, [each for each in tree.rglob("*") if each.is_file() and each.suffix != ".pyc"])
        )

    def add(self, outcome: Outcome) -> Outcome:
        """Write it down, and hand it back."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        entry = {name: value for name, value in vars(outcome).items() if name != "mutation"}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"tree": self.digest, "id": outcome.mutation.id, **entry}) + "\n")
        return outcome

    def outcomes(self, chosen: Sequence[Mutation]) -> Iterator[Outcome]:
        """Those of some bugs that were planted into this very tree."""
        known = {each.id: each for each in chosen}
        for entry in lines_of(self.path):
            if entry.pop("tree") == self.digest and (name := entry.pop("id")) in known:
                yield Outcome(known[name], **entry)
