"""Where a tuned setting pays, as a record: speed-up against draft length, nodes, batch, context and temperature.

`draftsmith tune` measures it and leaves `eval/tune.json` in the run's folder; this script only reads that.

    draftsmith tune runs/eagle-tiny
    python benchmarks/surfaces.py runs/eagle-tiny
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, hardware, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.eval.report.pays import in_words

HEADS = {"setting": "{setting}", "against": "{axis}", "speed-up": "{points}", "crosses 1": "{crosses}"}
SEED = "what another seed changes, which was not measured here"


def main() -> None:
    args = arguments()
    record = surfaces_record(args.run)
    print(printed(record))
    finish(record, args.json)


def surfaces_record(run: Path) -> Record:
    """A row per setting and axis.

    Raises:
        SystemExit: the run was not tuned, or without surfaces.
    """
    file = run / "eval" / "tune.json"
    if not file.is_file():
        raise SystemExit(f"{file} does not exist; `draftsmith tune {run}` writes it")
    tune: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if not tune["surfaces"]:
        raise SystemExit(f"{file} holds no surfaces; tune without --no-surfaces")
    machine = tune["environment"]
    return record_of(
        argparse.Namespace(seeds=[0]),
        title="Where a tuned setting pays",
        versions={name: each for name, each in machine["versions"].items() if each},
        hardware=hardware(machine),
        needs=["a run that `draftsmith tune` has tuned"],
        target=target_weights("tiny"),
        drafters=drafter_weights({run.name: run / "drafter"}),
        setup=f"Tuned at T = {tune['temperature']:g}, batch {tune['batch']}, {tune['max_new_tokens']} new tokens. "
        "Speed-up against draft length and nodes is predicted; against batch and context the setting decodes short "
        "answers beside plain decoding, with tau as it was tuned; against temperature it decodes whole answers.",
        intervals="none: a surface is a line through single measurements",
        tells_apart=SEED,
        audit={"verdict": tune["verdict"]},
        rows=[row_of(each) for each in tune["surfaces"] if each["points"]],
        tables={"surfaces": table_of(HEADS)},
        notes=[f"What tuning found: {tune['sentence']}."],
    )


def row_of(surface: dict[str, Any]) -> dict[str, Any]:
    """Value and speed-up of every point, and in words where the line lies above 1."""
    return {
        "setting": surface["label"],
        "axis": surface["axis"],
        "points": ", ".join(f"{value:g}: {speedup:.2f}" for value, speedup in surface["points"]),
        "crosses": in_words(surface["axis"], surface["points"], surface["crosses_1_at"]),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a tuned run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
