"""Every divergence on every source of data: one draft, equal steps, one table.

A shared draft (`distill-tiny`, or none with `--from-scratch`) is trained on with each divergence on
each kind of rows: the corpus (`gold`), the target's continuations of it (`target`, written once by
`draftsmith generate` at temperature 1), its greedy ones (`greedy`), the draft's own words
(`student`), half of the rows these and half the target's (`request`), either model's words token by
token (`token`), and what the target put in place of the shared draft's rejected tokens while
the two decoded (`replay`). A row of `student` and `token` has as many labels as prompts with
`--new-tokens` fit, one of `replay` as many as there were corrections: fewer than other rows, so
compare divergences within a source before sources with each other. Held out are rows
of the corpus, their first tokens as prompts, and what the target says behind these at temperature
1. Measured for each: the exact acceptance sum_v min(p, q) on held-out text and on the target's
held-out words, `alpha_hat` and tau of decoding at T = 0 and 1, and the paired difference to forward
KL on the same rows. Intervals are bootstraps over prompts, those of differences over the same ones
of both. All is trained once a seed of `--seeds`. A cell that was measured is not measured again, so
that a run that was cut goes on; other settings than `--losses`, `--sources` and `--seeds` need
another `--out`.

    python benchmarks/alignment.py --out runs/alignment
    python benchmarks/alignment.py --out runs/alignment-3 --seeds 0,1,2 --json alignment.json
    python benchmarks/alignment.py --out runs/alignment-40 --steps 40 --sources gold,student
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import Sums, audited, decoded, gain, mean
from draftsmith.benchmarks.common.held_out import HeldOut
from draftsmith.benchmarks.common.kept import same_settings
from draftsmith.benchmarks.common.markdown import cell_text, printed
from draftsmith.benchmarks.common.own_words import answered, prompts_in
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Figure, Record, table_of
from draftsmith.benchmarks.common.runs import QUIET, add_audit, by_seed, kept, parser_of, settings_of, trained
from draftsmith.data.config import DataConfig
from draftsmith.data.rows.prepare import prepare
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.registry import load_drafter
from draftsmith.launch.recipe.load import load_recipe

RECIPE = "distill-tiny"
LOSSES: dict[str, dict[str, float]] = {
    "kl": {},
    "reverse_kl": {"kl": 0.0, "reverse_kl": 1.0},
    "jsd": {"kl": 0.0, "jsd": 1.0},
    "tv": {"kl": 0.0, "tv": 1.0},  # which begins with KL by itself
    "lk_alpha": {"kl": 0.0, "lk_alpha": 1.0},
    "lk_lambda": {"kl": 0.0, "lk_lambda": 1.0},
    "ce": {"kl": 0.0, "ce": 1.0},
}
AIMED = ("tv", "lk_alpha", "lk_lambda")
SOURCES: dict[str, dict[str, Any]] = {
    "gold": {},
    "target": {},
    "greedy": {},
    "replay": {},
    "student": {"share": 1.0, "by": "student"},
    "request": {"share": 0.5, "by": "student"},
    "token": {"share": 1.0, "by": "mixed"},
}
# what writes the rows of a source before training: the target alone, or beside the shared draft
ANSWERS = {"target": "answers", "request": "answers", "greedy": "greedy", "replay": "replay"}
DEPTH = 4
# name of a figure: the group of sums that it is in, and its name there; its heading
FIGURES = {
    "alpha_on_text": ("exact", "text", "alpha on text"),
    "alpha_on_words": ("exact", "words", "alpha on the target's words"),
    "alpha_hat_T0": ("0", "alpha_hat", "alpha_hat T=0"),
    "tau_T0": ("0", "tau", "tau T=0"),
    "alpha_hat_T1": ("1", "alpha_hat", "alpha_hat T=1"),
    "tau_T1": ("1", "tau", "tau T=1"),
}
COMPARED = {
    "alpha_on_words": "words: less KL's",
    "tau_T0": "tau T=0: less KL's",
    "alpha_hat_T1": "alpha_hat T=1: less KL's",
}
Measured = dict[str, Sums]


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("losses", "sources", "seeds", "json"))
    logging.basicConfig(level=logging.WARNING)
    cells = [(source, loss) for source in args.sources for loss in args.losses]
    parts = by_seed(args)
    wanted = [
        path for part in parts for path in (part.out / "start.json", *(cell_file(part, *cell) for cell in cells))
    ]
    if not all(path.is_file() for path in wanted):
        measure_missing(cells, parts)
    measured = {cell: [json.loads(cell_file(part, *cell).read_text()) for part in parts] for cell in cells}
    starts = [json.loads((part.out / "start.json").read_text()) for part in parts]
    record = assembled(measured, starts, parts, args)
    print(printed(record))
    print("\n".join(verdicts(measured)))
    finish(record, args.json)


def measure_missing(cells: Sequence[tuple[str, str]], parts: Sequence[argparse.Namespace]) -> None:
    """Train and measure what no file of `--out` holds yet."""
    target = load_target(target_path(parts[0]))
    held_out = hold_out(target, parts[0])
    for part in parts:
        start = shared_start(part)
        written = {ANSWERS[each] for each in part.sources if each in ANSWERS}
        answers = {kind: target_words(kind, start, part) for kind in sorted(written)}
        kept(part.out / "start.json", lambda: measure_start(target, start, held_out, part))  # noqa: B023
        for cell in cells:
            if not cell_file(part, *cell).is_file():
                drafter = train_cell(*cell, start, answers, part)
                measured = kept(cell_file(part, *cell), lambda: measure(target, drafter, held_out, part))  # noqa: B023
                print(
                    f"{' '.join(cell)}: words {cell_text(value_of([measured], 'alpha_on_words'), '.4f')}", flush=True
                )


def cell_file(args: argparse.Namespace, source: str, loss: str) -> Path:
    path: Path = args.out / f"{source}-{loss}.json"
    return path


def target_path(args: argparse.Namespace) -> str:
    return str(load_recipe(RECIPE, args.set).recipe.target.path)


def data_config(args: argparse.Namespace) -> DataConfig:
    return load_recipe(RECIPE, args.set).recipe.data


# ---- training ---------------------------------------------------------------------------------


def shared_start(args: argparse.Namespace) -> Path:
    """The drafter that all cells are initialised from; untrained where they begin from scratch."""
    if args.from_scratch:
        return run_of(args, "start", {"loop.steps": 1, "optimizer.lr": 1e-12, "optimizer.warmup_steps": 0})
    return run_of(args, "start", {"loop.steps": args.start_steps})


def train_cell(source: str, loss: str, start: Path, answers: dict[str, Path], args: argparse.Namespace) -> Path:
    """Train `start` further with one divergence on one kind of rows; the drafter's folder."""
    values: dict[str, Any] = {f"objective.{name}": value for name, value in LOSSES[loss].items()}
    if source in ANSWERS:
        values |= {"data.source": answers[ANSWERS[source]], "data.packing": False}
    values |= {f"rollouts.{name}": value for name, value in SOURCES[source].items()}
    if SOURCES[source]:
        values |= {
            "rollouts.prompt_tokens": args.prompt_tokens,
            "rollouts.new_tokens": args.new_tokens,
            "rollouts.every_steps": args.every_steps,
        }
    steps = {"loop.steps": args.steps, "loop.batch_rows": args.batch_rows, "loop.micro_rows": args.batch_rows}
    own = {"model.start_from": start, "optimizer.lr": args.lr, **steps, **values}
    return run_of(args, f"{source}-{loss}", own)


def run_of(args: argparse.Namespace, name: str, values: dict[str, Any]) -> Path:
    """The drafter of a run of `distill-tiny` with these values."""
    quiet = QUIET | {"probe.prompts": 1, "probe.max_new_tokens": 8, "checkpoint.every_steps": 10**6}
    return trained(RECIPE, args.out / "runs" / name, settings_of(args) | quiet | values) / "drafter"


def target_words(kind: str, start: Path, args: argparse.Namespace) -> Path:
    """The target's continuations of windows of the training texts alone, as rows to train on.

    At temperature 1; `greedy` at 0; `replay`: where it overruled the shared draft at temperature 1.
    Seeds share what does not depend on their draft.
    """
    answers = (args.out if kind == "replay" else args.root) / kind
    return answered(
        prompts_in(args.root, data_config(args), args.answers),
        answers,
        target_path(args),
        temperature=0 if kind == "greedy" else 1,
        prompt_tokens=args.prompt_tokens,
        new_tokens=data_config(args).sequence_length - args.prompt_tokens - 2,
        corrections_of=start if kind == "replay" else None,
    )


# ---- measuring --------------------------------------------------------------------------------


def hold_out(target: Backbone, args: argparse.Namespace) -> HeldOut:
    """What all drafts are measured on."""
    rows = prepare(data_config(args), target.tokenizer, out=None).validation
    sizes = {name: getattr(args, name) for name in ("limit", "prompt_tokens", "max_new_tokens")}
    return HeldOut.of(target, rows, **sizes)


def measure_start(target: Backbone, drafter: Path, held_out: HeldOut, args: argparse.Namespace) -> dict[str, Any]:
    """The shared draft's measures, and its audit: all cells draft by the same code with other weights."""
    report = audited(target, load_drafter(drafter, target, draft_length=DEPTH), held_out.prompts, args)
    return {**measure(target, drafter, held_out, args), "verdict": report.verdict}


def measure(target: Backbone, drafter: Path, held_out: HeldOut, args: argparse.Namespace) -> Measured:
    """Per prompt or row, what is summed above and below the line of every measure."""
    proposer: Any = load_drafter(drafter, target, draft_length=DEPTH)
    decodes = {
        str(temperature): decoded(
            target,
            proposer,
            held_out.prompts,
            float(temperature),
            max_new_tokens=args.max_new_tokens,
            draws=args.draws if temperature else 1,
        )
        for temperature in (0, 1)
    }
    return {"exact": held_out.exact(proposer.module), **decodes}


# ---- the record -------------------------------------------------------------------------------


def value_of(parts: Sequence[Measured], name: str) -> Figure | None:
    """A figure over the seeds."""
    group, measure, _ = FIGURES[name]
    return mean([part[group] for part in parts], measure)


def gain_of(mine: Sequence[Measured], other: Sequence[Measured], name: str) -> Figure | None:
    """Difference of two figures over the prompts and seeds that both had."""
    group, measure, _ = FIGURES[name]
    return gain([part[group] for part in mine], [part[group] for part in other], measure)


def assembled(
    measured: dict[tuple[str, str], list[Measured]],
    starts: Sequence[Any],
    parts: Sequence[argparse.Namespace],
    args: argparse.Namespace,
) -> Record:
    """One row per cell, the shared draft first."""
    begin = "an untrained draft" if args.from_scratch else f"{args.start_steps} steps of KL"
    rows = [row_of("before", "", starts, None)]
    for (source, loss), cell in measured.items():
        rows.append(row_of(source, loss, cell, measured.get((source, "kl")) if loss != "kl" else None))
    heads = {"data": "{data}", "divergence": "{divergence}"}
    heads |= {head: f"{{{name}}}" for name, (_, _, head) in FIGURES.items()}
    heads |= {
        head: f"{{{name}_less_kl}}" for name, head in COMPARED.items() if any(f"{name}_less_kl" in row for row in rows)
    }
    runs = {f"{name}, seed {part.seed}": part.out / "runs" / name for name in names_of(measured) for part in parts}
    return record_of(
        args,
        title="Divergences and data for a draft",
        target=target_weights(target_path(args)),
        drafters=drafter_weights({name: run / "drafter" for name, run in runs.items()}),
        setup=f"From {begin}, {args.steps} steps of {args.batch_rows} rows; {args.limit} held-out prompts of "
        f"{args.prompt_tokens} tokens, {args.max_new_tokens} new ({args.draws} draws at T = 1), K = {DEPTH}.",
        intervals="95 % bootstrap intervals over prompts, of differences paired",
        audit={"verdict": ", ".join(sorted({each["verdict"] for each in starts})), "sees": "of the shared draft"},
        formats=dict.fromkeys(FIGURES, ".2f") | {f"{name}_less_kl": "+.4f" for name in COMPARED},
        rows=rows,
        tables={"alignment": table_of(heads)},
    )


def names_of(measured: dict[tuple[str, str], list[Measured]]) -> list[str]:
    """Names of all runs."""
    return ["start", *(f"{source}-{loss}" for source, loss in measured)]


def row_of(source: str, loss: str, own: Sequence[Measured], base: Sequence[Measured] | None) -> dict[str, Any]:
    """A cell's figures, and what they are above those of KL on the same source."""
    row = {"data": source, "divergence": loss, **{name: value_of(own, name) for name in FIGURES}}
    return row | ({} if base is None else {f"{name}_less_kl": gain_of(own, base, name) for name in COMPARED})


def verdicts(measured: dict[tuple[str, str], list[Measured]]) -> list[str]:
    """Which acceptance-aimed losses beat forward KL on the same rows beyond chance."""
    lines = []
    for (source, loss), own in measured.items():
        if loss not in AIMED or (source, "kl") not in measured:
            continue
        for name in ("alpha_on_text", *COMPARED):
            value = gain_of(own, measured[source, "kl"], name)
            low, high = (0.0, 0.0) if value is None else (value.low or 0.0, value.high or 0.0)
            direction = "above" if low > 0 else "below" if high < 0 else "not told apart from"
            lines.append(f"{source} {loss} is {direction} KL in {name}: {cell_text(value, '+.4f')}")
    return lines


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, out="runs/alignment")
    names = lambda word: word.split(",")  # noqa: E731
    parser.add_argument("--losses", type=names, default=list(LOSSES))
    parser.add_argument("--sources", type=names, default=list(SOURCES))
    parser.add_argument("--from-scratch", action="store_true")
    parser.add_argument("--start-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--every-steps", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--answers", type=int, default=412)
    parser.add_argument("--limit", type=int, default=64, help="held-out prompts")
    parser.add_argument("--draws", type=int, default=2, help="decodes of a prompt at T = 1")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    add_audit(parser, tokens=20_000, sequences=200_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
