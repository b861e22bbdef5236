"""How the parts of `make gpu` went, as a record: outcome, seconds, and the record that each has written.

`gpu.py` itself imports nothing but the standard library, as the machine's Python may lack the rest until wheels stand
in for it; so it calls this, with what it noted in a file. Read next: `gpu.py`; `common/records.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.records import table_of

HEADS = {"part": "{part}", "outcome": "{outcome}", "seconds": "{seconds}", "record": "{record}"}


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    noted = json.loads(args.noted.read_text(encoding="utf-8"))
    record = record_of(
        args,
        title="What was run on a GPU",
        command=noted["command"],
        needs=["a CUDA device"],
        target=None,
        setup="Parts of `make gpu`, each a process with a time of its own.",
        formats={"seconds": ".1f"},
        rows=noted["rows"],
        tables={"gpu": table_of(HEADS)},
        notes=[f"{part}: {end}" for part, end in noted["ends"].items()],
    )
    finish(record, args.json)
    return 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("noted", type=Path, help="what gpu.py noted: the command, rows, last lines of what failed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
