"""The tables of `../smollm2.py`, of what its verbs have left in their folders.

Read next: `../common/records.py`, what a record is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from draftsmith.benchmarks.common.provenance import drafter_weights, record_of, target_weights
from draftsmith.benchmarks.common.records import Cell, Figure, Record, figure, mean_figure, table_of
from draftsmith.benchmarks.common.stages import Stages, minutes
from draftsmith.benchmarks.public_model.verbs import beside, compared, elsewhere, half, runs_of
from draftsmith.drafters.tuned_file import read_tuned, read_tuned_methods
from draftsmith.eval.measure.arms import NOT_AUDITED
from draftsmith.eval.tune.settings import in_words
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.storage import json_lines

HEADS = {
    "method": "{method}, {setting}",
    "T": "{T}",
    "tau": "{tau}",
    "alpha, first 4 depths": "{n_alpha}",
    "speed-up": "{speedup}",
    "predicted": "{predicted}",
    "trained on": "{tokens} tokens, {minutes} min",
    "audit": "{verdict}",
}
CURVE = {"method": "{method}", "trained on": "{tokens} tokens", "tau of the probe": "{tau}", "audit": "{verdict}"}
KINDS = {
    "method": "{method}, {setting}",
    "prompts": "{prompts}",
    "tau": "{tau}",
    "alpha, first 4 depths": "{n_alpha}",
    "speed-up": "{speedup}",
    "audit": "{verdict}",
}
METHOD: dict[str, float | str] = {"of": "a comparison"}
KIND: dict[str, float | str] = {"of": "a comparison on prompts of other kinds"}
PROBE: dict[str, float | str] = {"of": "a probe"}
SEED_INTERVALS = "; over seeds the mean of their intervals' ends"
FORMATS = {"T": "g", "minutes": ".0f", "tau": ".2f", "n_alpha": ".2f", "speedup": ".2f", "predicted": ".2f"}


def recorded(args: argparse.Namespace, plan: Mapping[str, Any], stages: Stages) -> Record:
    """The table of all families that are measured."""
    rows = [row_of(row, *whose, args, plan, stages) for whose, row in results_of(compared(args), runs_of(args), args)]
    curve = curves(args) if args.probes else []
    kinds = on_other_prompts(args) if args.elsewhere else []
    _, alone = beside(args)
    tokens = sum(1 for _ in json_lines(args.out / "answers" / "answers.jsonl"))
    half_ = "in bf16 where it multiplies" if half() else "in fp32"
    questions_ = "questions about functions of Python's standard library, the measured ones of files apart"
    return record_of(
        argparse.Namespace(seeds=args.seeds),
        title="SmolLM2-135M-Instruct",
        target=target_weights(str(args.out / "target")),
        drafters=drafter_weights({name: args.out / name / "drafter" for name in runs_of(args)}),
        setup=f"{origin_of(args)}, converted; {tokens:,} of its own greedy answers of at most {args.answer_tokens} "
        f"tokens to {'rows of one’s own' if args.prompts else questions_}. Each family trains on rows of "
        f"{args.row_tokens:,} tokens, {half_}, for the steps that take {args.minutes:g} minutes here behind states of "
        "the target that are kept (the table's minutes hold making them). Tuned at T = 0 on other prompts: "
        f"{', '.join(['each drafter', *alone])}. All are audited, and measured in one interleaved run on {args.limit} "
        f"prompts, {args.new_tokens} new tokens, batch 1, target in {args.dtype}.",
        intervals="95 % bootstrap intervals over prompts" + (SEED_INTERVALS if len(args.seeds) > 1 else ""),
        formats=FORMATS,
        rows=[*over_seeds(rows), *curve, *kinds],
        tables={"smollm2": table_of(HEADS, METHOD)}
        | ({"curve": table_of(CURVE, PROBE)} if curve else {})
        | ({"elsewhere": table_of(KINDS, KIND)} if kinds else {}),
        notes=[
            f"Conversion {minutes(stages.of('convert'))}, answers {minutes(stages.of('answers'))}.",
            replays_of(compared(args)),
            *args.note,
        ],
    )


def replays_of(folder: Path) -> str:
    """What the audits' greedy replays found, over all that were compared."""
    audits = [json.loads(each.read_text(encoding="utf-8")) for each in sorted(folder.glob("audit-*.json"))]
    sampled, greedy = min(each["rosenblatt"]["tokens"] for each in audits), [each["replay"] for each in audits]
    near, explained = [each["near_ties"] for each in greedy], max(each["explained"] for each in greedy)
    tokens, bugs = min(each["tokens"] for each in greedy), sum(each["bugs"] for each in greedy)
    return (
        f"Each audit judged {sampled:,} sampled tokens or more, and {tokens:,} greedy ones or more, of which "
        f"{min(near)} to {max(near)} are near-ties (rounding explains at most {explained:.0f}) and {bugs} are no "
        "argmax beyond that."
    )


def results_of(
    folder: Path, runs: Iterable[str], args: argparse.Namespace
) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """The rows of a comparison, each with its run and the method around that; a method alone has no run."""
    rows = json.loads((folder / "results.json").read_text(encoding="utf-8"))["rows"]
    around, alone = beside(args)
    # at each temperature they stand in the order in which they were named
    names = [(name, method) for name in runs for method in ("", *around)] + [("", name) for name in alone]
    return zip(cycle(names), rows)


def row_of(
    row: Mapping[str, Any], name: str, method: str, args: argparse.Namespace, plan: Mapping[str, Any], stages: Stages
) -> dict[str, Any]:
    """A line of the table: a run (`name`), by itself or within a method, or a method alone."""
    steps = plan[runs_of(args)[name][0]] if name else 0
    return METHOD | {
        **named(name, method, args),
        "T": row["temperature"],
        **measured(row),
        "predicted": row["predicted_speedup"],
        "tokens": f"{steps * args.batch_rows * args.row_tokens / 1e6:.2f} M" if name else "no",
        "minutes": round(stages.of(f"train {name}") / 60) if name else 0,
        "verdict": row["verdict"],
    }


def named(name: str, method: str, args: argparse.Namespace) -> dict[str, Cell]:
    """What a row is of, and the setting that `tune` chose for it."""
    if name:
        trained = load_recipe(f"{runs_of(args)[name][0]}-small").recipe.method
        title = f"{method} around {trained}" if method else trained
        tuned = read_tuned(args.out / name / "drafter")
    else:
        title, tuned = method, read_tuned_methods(args.out / args.families[0] / "eval" / "tune.json")[method]
    words = "slower at every setting" if tuned.plain else in_words(tuned.values) or "as the recipe has it"
    return {"method": title, "setting": words}


def measured(row: Mapping[str, Any]) -> dict[str, Cell]:
    """Acceptance and speed of a row of results, or of one set of it."""
    n_alpha = [mean for mean, *_ in row.get("n_alpha", [])[:4] if mean is not None]
    return {"tau": figure(row["tau"]), "n_alpha": n_alpha, "speedup": figure(row["speedup"])}


def on_other_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each set of prompts that no drafter was trained for, and one in which all sets count alike."""
    rows = []
    for whose, row in results_of(elsewhere(args), args.families, args):
        sets = [(each["set"], each) for each in row.get("sets", [])] or [(row["prompts"], row)]
        together = [("all sets", row["over_sets"])] if "over_sets" in row else []
        rows += [
            KIND | named(*whose, args) | {"prompts": name, **measured(each), "verdict": each["verdict"]}
            for name, each in (*sets, *together)
        ]
    return rows


def curves(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What the probes found while the runs were trained, a row for each family and place, over its seeds."""
    found: dict[tuple[str, int], list[float]] = {}
    for name, (family, _) in runs_of(args).items():
        for line in json_lines(args.out / name / "metrics.jsonl"):
            if line["kind"] == "probe":
                found.setdefault((family, line["step"]), []).append(line["tau"])
    step_tokens = args.batch_rows * args.row_tokens / 1e6
    return [
        PROBE
        | {
            "method": load_recipe(f"{family}-small").recipe.method,
            "tokens": f"{step * step_tokens:.2f} M",
            "tau": mean_figure([Figure(value=tau) for tau in taus]),
            "verdict": NOT_AUDITED,
        }
        for (family, step), taus in found.items()
    ]


def over_seeds(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of runs that differ by their seed alone as one row each."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["T"]), []).append(row)
    return [{name: joined([row[name] for row in group]) for name in group[0]} for group in groups.values()]


def joined(cells: Sequence[Any]) -> Cell:
    """A cell over seeds: the mean of numbers; texts that differ one after the other."""
    first = cells[0]
    if len(cells) == 1:
        return first
    if isinstance(first, Figure):
        return mean_figure(cells)
    if isinstance(first, list):
        return [fmean(each) for each in zip(*cells)]
    return fmean(cells) if isinstance(first, (int, float)) else " / ".join(dict.fromkeys(map(str, cells)))


def origin_of(args: argparse.Namespace) -> str:
    """The file, as the converted config names it."""
    config = json.loads((args.out / "target" / "config.json").read_text(encoding="utf-8"))
    origin = config["draftsmith_gguf"]
    return f"`{origin['file']}` ({origin['quantisation']}, SHA-256 {origin['sha256'][:12]})"
