"""A finished quickstart, and what the README's two commands took, as records in `docs/results`.

`make quickstart` leaves `quickstart/run/eval/results.json` and its audits, and a report, which the pages show as their
example; `shared/checks/newcomer` clones the repository, runs both commands and prints a line for each:

    make quickstart: passed in 663 s with its set-up, largest process 1.8 GB; log: ...

    python benchmarks/quickstart_results.py quickstart --seconds 573
    python benchmarks/quickstart_results.py --newcomer newcomer.log
    python benchmarks/tables.py
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, hardware, record_of, target_weights
from draftsmith.benchmarks.common.records import FOLDER, Record, figure, read_record, table_of
from draftsmith.eval.report.tables import agreement_line, best_measured, best_predicted
from draftsmith.launch.quickstart import RECIPE, RUN, TRAINING_FREE
from draftsmith.launch.recipe.load import load_recipe

NAMES = {"eagle": "EAGLE-1", "untrained eagle": "untrained EAGLE-1"}
PASSED = re.compile(r"^make (\w+): (\w+) in (\d+) s with its set-up, largest process ([\d.]+) GB", re.MULTILINE)
LOG = re.compile(r"^make quickstart: .*; log: (.+)$", re.MULTILINE)
FIRST = re.compile(r"^2/\d .*?\((\d+) s so\s+far\)", re.MULTILINE | re.DOTALL)
"""The stage behind the first look begins; a terminal may have broken the line."""
HEADS = {"command": "{command}", "outcome": "{outcome}", "time": "{seconds} s", "largest process": "{peak} GB"}
REPORT = "quickstart-report.html"
SEED = "what another seed changes, which was not measured here"


def main() -> None:
    args = arguments()
    records = {}
    if args.folder is not None:
        records["quickstart"] = quickstart_record(args.folder, args.seconds)
    if args.newcomer is not None:
        records["newcomer"] = newcomer_record(args.newcomer.read_text(encoding="utf-8"))
    if not records:
        raise SystemExit("name the quickstart's folder, or a log by --newcomer")
    for name, record in records.items():
        print(printed(record))
        finish(record, args.results / f"{'-'.join(filter(None, (name, args.on)))}.json")
    if args.folder is not None and args.on is None:
        shutil.copy(args.folder / RUN / "report.html", args.results / REPORT)


def quickstart_record(folder: Path, seconds: float | None) -> Record:
    """The table of a finished quickstart; columns and formats are those of the record that stands.

    Args:
        folder: what `draftsmith quickstart --out` wrote.
        seconds: what it took by the clock; None leaves it unsaid.
    """
    results = json.loads((folder / RUN / "eval" / "results.json").read_text(encoding="utf-8"))
    standing = read_record(FOLDER / "quickstart.json")
    machine, settings = results["environment"], results["settings"]
    return record_of(
        argparse.Namespace(seeds=[0]),
        title="Quickstart",
        command="make quickstart",
        versions={name: each for name, each in machine["versions"].items() if each},
        hardware=hardware(machine),
        target=target_weights("tiny"),
        drafters=drafter_weights({RECIPE: folder / RUN / "drafter"}),
        setup=f"Trained, tuned, audited and measured: {trained(folder)}. {settings['limit']} prompts from held-out "
        f"library files, which tuning does not see, {settings['max_new_tokens']} new tokens, fp32; the untrained "
        f"drafter on {results['rows'][-1]['requests']} of them.",
        intervals="95 % bootstrap intervals over prompts",
        tells_apart=SEED,
        audit={"verdict": "of each row; the untrained drafter runs the trained one's code", "sees": sees(folder)},
        formats=standing.formats,
        rows=[row_of(row) for row in results["rows"]],
        tables={name: table.model_dump(exclude_unset=True) for name, table in standing.tables.items()},
        notes=[*notes_of(results, seconds), tuned(folder)],
    )


def trained(folder: Path) -> str:
    """Name, training steps and precision of what was trained; everything else is in fp32."""
    recipe = load_recipe(str(folder / RUN / "run.yaml")).recipe
    precision = recipe.loop.precision_on(cpu=True)
    return f"{recipe.name} ({recipe.loop.steps} steps in {precision})"


def tuned(folder: Path) -> str:
    """What tuning found on prompts of its own, in its words."""
    files = (folder / RUN / "eval" / "tune.json", folder / TRAINING_FREE / "tune.json")
    found = [json.loads(each.read_text(encoding="utf-8"))["sentence"] for each in files]
    return f"Tuned on other prompts: {'; '.join(found)}."


def sees(folder: Path) -> str:
    """The smallest biases that the drafter's audit would have seen."""
    audit = json.loads((folder / RUN / "eval" / "audit.json").read_text(encoding="utf-8"))
    real, enumerated = (audit[part]["detectable"] for part in ("rosenblatt", "enumeration"))
    return f"a bias of {real:.4f} in total variation on the real pair, {enumerated:.4f} on the enumerated distribution"


def row_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row of results under the record's names."""
    audited = row.get("audited") or row["method"]
    borrowed = audited != row["method"]
    return {
        "drafter": NAMES.get(row["method"], row["method"]),
        "T": row["temperature"],
        "tau": figure(row["tau"]),
        "alpha": figure(row["alpha"]),
        "speedup": figure(row["speedup"]),
        "predicted": row["predicted_speedup"],
        "loop_share": row["loop_share"],
        "verdict": f"as {NAMES.get(audited, audited)}" if borrowed else row["verdict"],
    }


def notes_of(results: dict[str, Any], seconds: float | None) -> list[str]:
    """Time, loops and the best draft lengths."""
    # the first row's prompts are all of them; the control decodes a part
    loops = next(row["loop_share"] for row in results["rows"] if row["temperature"] == 0)
    notes = [] if seconds is None else [f"The command took {seconds:.0f} s."]
    second = results.get("second")
    if second:
        notes.append(f"{agreement_line(second)[0].upper()}{agreement_line(second)[1:]}: {compared(second)}.")
    notes.append(f"The target's greedy text has {loops:.0%} of its tokens in loops (a row is flagged at 50 %).")
    sweep = results["sweep"]
    if sweep:
        notes.append(
            f"Best draft length of the sweep: {best_predicted(sweep)} predicted, {best_measured(sweep)} measured."
        )
    return notes


def compared(second: list[dict[str, Any]]) -> str:
    """tau on the second prompt set, and in brackets on the first."""
    return ", ".join(
        f"{NAMES.get(row['method'], row['method'])} at T = {row['temperature']:g} {row['tau'][0]:.2f} "
        f"(first set {row['first_tau'][0]:.2f})"
        for row in second
    )


def newcomer_record(log: str) -> Record:
    """What the README's commands took in a fresh clone, installation included.

    Raises:
        SystemExit: the log has no line of a command.
    """
    rows = [
        {"command": f"make {name}", "outcome": outcome, "seconds": float(seconds), "peak": float(peak)}
        for name, outcome, seconds, peak in PASSED.findall(log)
    ]
    if not rows:
        raise SystemExit("the log has no line `make NAME: passed in N s with its set-up, largest process N GB`")
    printed_logs = [Path(found) for found in LOG.findall(log)]
    firsts = [FIRST.search(each.read_text(encoding="utf-8")) for each in printed_logs if each.is_file()]
    return record_of(
        argparse.Namespace(),
        title="The README's commands in a fresh clone",
        command=" && ".join(str(row["command"]) for row in rows),
        target=None,
        setup="A fresh clone, no virtual environment on the path; each command makes its own, so its time holds the "
        "installation.",
        formats={"seconds": ".0f", "peak": ".1f"},
        rows=rows,
        tables={"newcomer": table_of(HEADS)},
        notes=[
            f"The first result, what copying from the text gains on the machine, came {first[1]} s after "
            "`make quickstart` had installed."
            for first in firsts
            if first is not None
        ],
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="a finished quickstart")
    parser.add_argument("--seconds", type=float, help="what it took by the clock")
    parser.add_argument("--newcomer", type=Path, metavar="LOG", help="what shared/checks/newcomer printed")
    parser.add_argument(
        "--on", metavar="avx512", help="a processor beside that of the README's tables, in the file's name"
    )
    parser.add_argument("--results", type=Path, default=FOLDER)
    return parser.parse_args()


if __name__ == "__main__":
    main()
