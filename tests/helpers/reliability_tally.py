"""How often the reliability tests tried something, and how often it failed, for `docs/reliability.md`.

A test calls `tally` behind what it tried, so only what really ran is counted. Without the variable
`DRAFTSMITH_TALLY` nothing is written. Read next: `benchmarks/reliability.py`, which adds them up.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def tally(row: str, *, tried: int, failed: int = 0) -> None:
    """Add `tried` tries, of which `failed` lost something, to the table's row `row`."""
    path = os.environ.get("DRAFTSMITH_TALLY")
    if path is None:
        return
    line = json.dumps({"row": row, "tried": tried, "failed": failed}) + "\n"
    with Path(path).open("a", encoding="utf-8") as file:  # one write of a line: workers may share the file
        file.write(line)
