"""Plants one known bug after another into a copy of the tree, and says which of them the tests see.

Every bug is one that somebody could write: a mask that is forgotten, a count that is off by one, a random
number used twice. Each comes with the few tests that should notice, which run on the clean copy first.
83 of them were planted by hand in version 0.1.0, of which 62 were seen; those whose id begins with I are
bugs behind which a test passed for the wrong reason, with P such as survived a second study, with W those
that were made for every number that what measures, reports and shares hands out (`bugs/`).

    python benchmarks/mutations                    # all of them: an hour of one core
    python benchmarks/mutations --only T04,D14     # some
    python benchmarks/mutations --rooms eval/tune  # those of a folder
    python benchmarks/mutations --json docs/results/mutations.json

A run that was stopped goes on: what became of a bug is kept in `.cache/mutations.jsonl`, and holds for the very same
tree alone. With `--only` and `--rooms`, what `--json` holds of the others stays; every row names the commit that it
is of.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import draftsmith
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import commit, finish, record_of
from draftsmith.benchmarks.common.records import Record, read_record, table_of
from draftsmith.benchmarks.mutations import decoding, drafters, others, trainers
from draftsmith.benchmarks.mutations.kept import Kept
from draftsmith.benchmarks.mutations.listed import listed
from draftsmith.benchmarks.mutations.mutation import Mutation
from draftsmith.benchmarks.mutations.planting import Bench, Outcome, check_clean, copied, outcome_of

ROOT = Path(draftsmith.__file__).parent
MUTATIONS = (*decoding.MUTATIONS, *drafters.MUTATIONS, *trainers.MUTATIONS, *others.MUTATIONS, *listed())
LATER = ("I", "B", "M", "P", "V", "W")
"""How the ids of bugs begin that were planted behind the first study."""
SURVIVED = "P"
"""How the ids of those begin that no test saw in a second study."""
VERDICTS = ("killed", "survived", "broken", "timed out")


def main() -> None:
    args = arguments()
    chosen = [each for each in chosen_of(args.only) if not args.rooms or each.room in args.rooms]
    if args.rooms:
        args.only = [each.id for each in chosen]
    os.nice(5)
    outcomes = outcomes_of(chosen, limit=args.limit)
    before = read_record(args.json) if args.only and args.json and args.json.is_file() else None
    if before is not None:
        outcomes += earlier(before, args.only)
    record = assembled(outcomes, args)
    if before is not None:  # what made the whole of it
        record = record.model_copy(update={"command": before.command})
    print(printed(record))
    finish(record, args.json)


def outcomes_of(chosen: Sequence[Mutation], *, limit: float) -> list[Outcome]:
    """What becomes of bugs; of those that were planted into the very same tree before, what became of them then."""
    of = commit()
    with tempfile.TemporaryDirectory() as folder, Bench(copied(ROOT, Path(folder))) as bench:
        kept = Kept.of(bench.tree, ROOT / ".cache" / "mutations.jsonl")
        outcomes = {each.mutation.id: each for each in kept.outcomes(chosen)}
        left = [each for each in chosen if each.id not in outcomes]
        print(f"{len(chosen)} bugs, {len(left)} of them not planted yet; first their tests without any", flush=True)
        if left:
            check_clean(bench, left, limit=limit * len(left))
        for mutation in left:
            made = replace(outcome_of(bench, mutation, limit=limit), commit=of)
            outcomes[mutation.id] = kept.add(made)
            print(line_of(made), flush=True)
    return [outcomes[each.id] for each in chosen]


def chosen_of(only: Sequence[str]) -> list[Mutation]:
    """The mutations of some ids, or all; SystemExit for an id that is none."""
    known = {each.id: each for each in MUTATIONS}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise SystemExit(f"no bug has the id {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in only] or list(MUTATIONS)


def line_of(outcome: Outcome) -> str:
    """One outcome for the terminal."""
    shown = outcome.by or outcome.mutation.bug
    return f"{outcome.mutation.id:5} {outcome.verdict:9} {outcome.seconds:5.0f} s  {shown}"


def earlier(record: Record, only: Sequence[str]) -> list[Outcome]:
    """What a record says of bugs that are still planted and were not planted now."""
    known = {each.id: each for each in MUTATIONS if each.id not in only}
    rows: list[dict[str, Any]] = [row for row in record.rows if row["of"] == "bug" and row["id"] in known]
    return [Outcome(known[r["id"]], r["outcome"], r["by"].strip("-"), r["seconds"], r["commit"]) for r in rows]


def assembled(outcomes: Sequence[Outcome], args: argparse.Namespace) -> Record:
    """A row per bug, and per room how many were seen."""
    outcomes = sorted(outcomes, key=lambda each: MUTATIONS.index(each.mutation))
    bugs: list[dict[str, Any]] = [
        {
            "of": "bug",
            "id": each.mutation.id,
            "file": each.mutation.file,
            "bug": each.mutation.bug,
            "outcome": each.verdict,
            "by": each.by or "-",
            "seconds": round(each.seconds),
            "commit": each.commit,
        }
        for each in outcomes
    ]
    heads = {"room": "{room}", "planted": "{planted}", **{name: f"{{{name.replace(' ', '_')}}}" for name in VERDICTS}}
    return record_of(
        args,
        title="Planted bugs that the tests see",
        target=None,
        setup="One bug at a time in a copy of the tree, each with the few tests that should notice; all of those pass "
        "on the copy without a bug. A bug is killed where a test fails. Hypothesis draws the same examples in every "
        "run and does not shrink.",
        rows=[*rooms(outcomes), *bugs],
        tables={"mutations": table_of(heads, {"of": "room"})},
        notes=notes(outcomes),
    )


def rooms(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Counts per room and over all."""
    names = [*dict.fromkeys(each.mutation.room for each in outcomes), "all"]
    rows = []
    for name in names:
        mine = [each for each in outcomes if name in ("all", each.mutation.room)]
        counts = Counter(each.verdict for each in mine)
        row: dict[str, Any] = {"of": "room", "room": name, "planted": len(mine)}
        rows.append(row | {each.replace(" ", "_"): counts[each] for each in VERDICTS})  # type: ignore[index]
    return rows


def notes(outcomes: Sequence[Outcome]) -> list[str]:
    """How many of the first study's are seen now, and every bug that no test sees, by name."""
    first = [each for each in outcomes if not each.mutation.id.startswith(LATER)]
    seen = sum(each.verdict == "killed" for each in first)
    said = [f"Of the {len(first)} bugs of the study of 0.1.0, whose tests saw 62 of 83, {seen} are killed."]
    second = [each.verdict == "killed" for each in outcomes if each.mutation.id.startswith(SURVIVED)]
    if second:
        said.append(
            f"Of the {len(second)} that survived a second study, whose tests saw 69 of 121, {sum(second)} are killed."
        )
    commits = Counter(each.commit for each in outcomes)
    if len(commits) > 1:
        parts = ", ".join(f"`{name}` ({count})" for name, count in commits.items())
        said.append(f"Planted again where the code has changed; bugs by commit: {parts}.")
    left = [each for each in outcomes if each.verdict != "killed"]
    said += [f"{each.mutation.id} ({each.verdict}): {each.mutation.bug}, `{each.mutation.file}`." for each in left]
    return said if left else [*said, "No bug survived."]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="ids, with commas between")
    parser.add_argument(
        "--rooms", type=lambda text: text.split(","), default=[], help="folders: eval/tune,eval/server"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that the tests of a bug may take")
    parser.add_argument("--json", type=Path, help="where the record goes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
