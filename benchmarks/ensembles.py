"""Boost-tuned ensembles against their honest controls: copies with other seeds, and one larger SSM.

A base draft is distilled once, and one of n times its parameters for every n of `--sizes`. From
the base every arm tunes its SSMs for `--steps` steps each on the same continuations of the target:

  copies      each on all of them, seeds differ: the gain of any ensemble
  boosted     each on what those before it miss, by every setting of `--settings`; a setting may
              change other values too ("soft 2 continuation=64 samples=2048"), fields of boost
              or, with a dot, of any section: a sweep of the options
  n x size    one SSM of n times the parameters, as many steps: as much work in all

SSM 1 is the same in all arms but the last, and those that change more than what counts as covered
and for how much. The first n SSMs of an arm decode held-out prompts as an ensemble, n = 1 up to
`--members`. What is printed: coverage of held-out continuations by the union, tau (tokens per
target call), tokens verified per call, the speed-up that the speed model predicts from costs
measured here, and boosted - copies (those of the same other values, where there are), paired over
prompts; 95 % intervals over prompts, of coverage over samples. Everything is kept in `--out`, so
that a run that was cut goes on where it was; arms and training seeds (`--seeds`) may be added,
other settings need another `--out`. With `--first` SSM 1 of copies and boosted begins in another
folder than the others, for example a quantised copy of the target that is taken as it stands: what
a further SSM is worth behind one that covers much. Its costs differ from the others', so no speed-
up is predicted.

    python benchmarks/ensembles.py --out runs/ensembles
    python benchmarks/ensembles.py --settings "span 4,soft 4,soft 2 temperature=1" --sizes ""
    python benchmarks/ensembles.py --out runs/ensembles-chat --prompts prompts.jsonl \\
        --set data.source=chats --set target.path=runs/target-chat/target
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import audited
from draftsmith.benchmarks.common.ensemble_rows import COPIES, FORMATS, HEADS, Run, rows_at
from draftsmith.benchmarks.common.kept import file_name, is_finished, same_settings
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.benchmarks.common.runs import add_audit, add_decoding, by_seed, kept, parser_of, settings_of, trained
from draftsmith.data.prompts import load_prompts
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.requests import Request, first_turns, make_requests
from draftsmith.eval.measure.rounds import decode
from draftsmith.eval.measure.speed import Costs, measure_costs
from draftsmith.launch.recipe.load import load_recipe

TEMPERATURES = (0.0, 1.0)
AUDITED = (0.6, 1.0)  # every audit replays greedy text, T = 0, too
# values on which the continuations depend, and those that leave SSM 1 as it is
SAMPLES = ("samples", "held_out", "prompt_tokens", "continuation", "temperature", "seed")
WEIGHING = ("weights", "unit", "match_tokens", "soft", "start_from")


# ---- training ---------------------------------------------------------------------------------


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("settings", "sizes", "members", "train_only", "seeds", "json"))
    of_seeds = [train_all(part) for part in by_seed(args)]
    if args.train_only:
        return
    runs = of_seeds[0]
    target = target_of(runs[0].folder)
    costs = {} if args.first else all_costs(runs, target, args)
    for part, own in zip(by_seed(args), of_seeds, strict=True):
        for run in own:
            measure(run, target, part)
    verdict = audit_of(runs[-1 if len(runs) == 1 else 1], target, args)
    record = assembled(of_seeds, costs, verdict, args)
    print(printed(record))
    finish(record, args.json)


def train_all(args: argparse.Namespace) -> list[Run]:
    """Every arm's run of a seed, those that are finished as they are."""
    base = args.base or train(args, "base", args.base_recipe, base_values(args)) / "drafter"
    numbers = tuple(range(1, args.members + 1))
    arms = {COPIES: {"boost.weights": "none"}, **{each: setting(each) for each in args.settings}}
    runs = []
    for name, values in arms.items():
        folders = [args.first or base, *[base] * (args.members - 1)]
        origins = json.dumps([str(folder.resolve()) for folder in folders])
        run = boost(args, name, {**values, "boost.start_from": origins}, args.members)
        runs.append(Run(name, run, numbers, "base", own_first=not shares_first(values)))
    for n in args.sizes:
        sizes = larger(args, n)
        big = train(args, f"base-{n}", args.base_recipe, {**base_values(args), **sizes}) / "drafter"
        own = {"boost.weights": "none", "boost.start_from": json.dumps([str(big.resolve())])}
        runs.append(Run(f"{n} x size", boost(args, f"size {n}", own, 1), (1,), f"base-{n}"))
    return runs


def setting(text: str) -> dict[str, str]:
    """`span 4`, `sample 8`, `sample 0`: hard, the unit and its tokens; `soft 2` weighs spans;
    `copies` weighs nothing. Other values follow as `field=value`."""
    kind, *others = text.split()
    tokens = others.pop(0) if kind != COPIES and others else ""
    if kind not in ("span", "sample", "soft", COPIES) or tokens.isdigit() == (kind == COPIES):
        raise SystemExit(f"--settings: {text!r}; expected span M, sample M, soft M or copies")
    if any("=" not in other for other in others):
        raise SystemExit(f"--settings: {text!r}; after the tokens, field=value was expected")
    if kind == COPIES:
        values = {"boost.weights": "none"}
    else:
        weights = "soft" if kind == "soft" else "hard"
        unit = "sample" if kind == "sample" else "span"
        values = {"boost.weights": weights, "boost.unit": unit, "boost.match_tokens": tokens}
    for field, value in (other.split("=", 1) for other in others):
        values[field if "." in field else f"boost.{field}"] = value
    return values


def shares_first(values: dict[str, str]) -> bool:
    """Whether a setting leaves SSM 1 as the copies have it."""
    return values.keys() <= {f"boost.{field}" for field in WEIGHING}


def samples_of(values: dict[str, str]) -> str:
    """The folder of a setting's continuations."""
    changed = [f"{key}-{values[f'boost.{key}']}" for key in SAMPLES if f"boost.{key}" in values]
    return "-".join(["continuations", *changed])


def base_values(args: argparse.Namespace) -> dict[str, Any]:
    """Of a base draft."""
    own = {"loop.steps": args.base_steps, "loop.validate_every": 100_000, "probe.every_steps": ""}
    return own | chosen(args, boosted=False)


def boost(args: argparse.Namespace, name: str, values: dict[str, Any], members: int) -> Path:
    """A run of method boost; copies' SSM 1 and continuations are taken over where they fit."""
    folder: Path = args.out / "runs" / file_name(name)
    first = args.out / "runs" / file_name(COPIES) / "ssm-1"
    if is_finished(folder) and not (folder / f"ssm-{members}").exists():
        raise too_few(folder, members)
    takes_over = members > 1 and name != COPIES and shares_first(values)
    if takes_over and not (folder / "ssm-1").exists():
        staging = folder.with_name(f".staging-{folder.name}")
        shutil.rmtree(staging, ignore_errors=True)
        # finished: its checkpoints, which are the other run's, are not gone on from
        shutil.copytree(first, staging, ignore=shutil.ignore_patterns("checkpoints"))
        folder.mkdir(parents=True, exist_ok=True)
        staging.rename(folder / "ssm-1")
    shared = {
        "boost.members": members,
        "boost.stop_share": 0,
        "boost.continuations": args.out.resolve() / samples_of(values),
        "loop.steps": args.steps,
        "optimizer.lr": args.lr,
        "optimizer.warmup_steps": min(10, args.steps // 4),
        "loop.validate_every": 100_000,
        "probe.every_steps": "",
        "probe.prompts": 2,
    }
    return train(args, name, "boost-tiny", {**shared, **chosen(args, boosted=True), **values})


def chosen(args: argparse.Namespace, *, boosted: bool) -> dict[str, Any]:
    """The seed, and what `--set` asks for; `boost.` values are for runs of that method alone."""
    return {key: value for key, value in settings_of(args).items() if boosted or not key.startswith("boost.")}


def larger(args: argparse.Namespace, n: int) -> dict[str, int]:
    """The hidden size with about n times the base's parameters, its other ratios kept."""
    values = [(key, str(value)) for key, value in chosen(args, boosted=False).items()]
    recipe = load_recipe(args.base_recipe, values).recipe
    vocabulary = load_target(recipe.target.path).vocabulary
    model = recipe.model
    hidden, layers = model.hidden or 128, model.layers or 1
    attention = 2 * ((model.heads or 2) + (model.kv_heads or 2)) * (model.head_size or 64)
    spread = (model.intermediate or 3 * hidden) / hidden

    def count(size: int) -> float:
        return vocabulary * size + layers * (attention * size + 3 * spread * size * size)

    wanted = n * count(hidden)
    nearest = min(range(hidden, 16 * hidden, 8), key=lambda size: abs(count(size) - wanted))
    return {"model.hidden": nearest, "model.intermediate": int(spread * nearest)}


def train(args: argparse.Namespace, name: str, recipe: str, values: dict[str, Any]) -> Path:
    """The run's folder, trained now if it is not finished."""
    return trained(recipe, args.out / "runs" / file_name(name), values)


def too_few(path: Path, members: int) -> SystemExit:
    """What ends a call for more SSMs than were kept: the first ones serve fewer, not more."""
    return SystemExit(f"{path} has fewer SSMs than the {members} of --members. Name another --out, or remove this one")


# ---- measuring --------------------------------------------------------------------------------


def measure(run: Run, target: Backbone, args: argparse.Namespace) -> None:
    """Steps and emitted tokens of every prompt, for every n and temperature, into a file."""
    path = measured_file(run, args)
    rows = kept(path, partial(measured_rows, run, target, args))["rows"]
    if rows[-1]["members"] < run.counts[-1]:
        raise too_few(path, run.counts[-1])


def measured_rows(run: Run, target: Backbone, args: argparse.Namespace) -> dict[str, Any]:
    """What `measure` keeps."""
    config, requests = asked(target, args)
    rows = []
    for n in run.counts:
        drafter = load_drafter(
            run.folder / "drafter", target, draft_length=args.draft_length, config=DrafterConfig(members=n)
        )
        for temperature in TEMPERATURES:
            (run_of_arm,) = decode(target, [(Arm(run.name, drafter), None)], requests, config, temperature)
            rows.append(
                {
                    "members": n,
                    "temperature": temperature,
                    "nodes": [each.nodes for each in run_of_arm.generations],
                    "calls": [each.target_calls for each in run_of_arm.generations],
                    "steps": [each.steps for each in run_of_arm.counts],
                    "emitted": [each.emitted for each in run_of_arm.counts],
                }
            )
    return {"rows": rows}


def asked(target: Backbone, args: argparse.Namespace) -> tuple[EvalConfig, list[Request]]:
    """How prompts are decoded, and which."""
    config = EvalConfig(
        prompts=args.prompts,
        limit=args.limit,
        max_new_tokens=args.max_new_tokens,
        prompt_tokens=args.prompt_tokens,
        draft_length=args.draft_length,
        sweep=[],
        repeats=1,
        batch=args.batch,
    )
    prompts = load_prompts(config.prompts, limit=config.limit, seed=config.seed)
    return config, make_requests(target, prompts, config)


def all_costs(runs: Sequence[Run], target: Backbone, args: argparse.Namespace) -> dict[str, Costs]:
    """By what they are like; verify calls are the target's own, so one measurement serves all."""
    costs = {run.costs_like: measured_costs(run, target, args) for run in runs}
    return {name: replace(each, c_v=costs["base"].c_v) for name, each in costs.items()}


def measured_costs(run: Run, target: Backbone, args: argparse.Namespace) -> Costs:
    """Times of verify calls and of a step of one of the run's SSMs, measured once."""

    def timed() -> list[Any]:
        draft = load_target(str(run.folder / "drafter" / "ssm-1"))
        widest = 1 + args.draft_length * args.members
        sizes = sorted({1, 2, 4, 8, 12, args.draft_length, widest - 1})
        measured = measure_costs(target, draft, sizes, context=args.context)
        return [measured.target_call_seconds, measured.c, measured.c_v]

    seconds, c, c_v = kept(args.out / f"costs-{file_name(run.costs_like)}.json", timed)
    return Costs(seconds, c, {int(nodes): cost for nodes, cost in c_v.items()})


def audit_of(run: Run, target: Backbone, args: argparse.Namespace) -> str:
    """The verdicts of the audit on a whole ensemble, its greedy text replayed in each; the other
    arms are the same code."""

    def verdicts() -> dict[str, str]:
        ids = first_turns(asked(target, args)[1])
        drafter = load_drafter(run.folder / "drafter", target, draft_length=args.draft_length)
        return {f"T = {at:g}": audited(target, drafter, ids, args, temperature=at).verdict for at in AUDITED}

    return ", ".join(f"{verdict} at {at}" for at, verdict in kept(args.out / "audit.json", verdicts).items())


def target_of(run: Path) -> Backbone:
    """The target of a run."""
    return load_target(load_recipe(str(run / "run.yaml")).recipe.target.path)


def measured_file(run: Run, args: argparse.Namespace) -> Path:
    path: Path = args.out / f"measured-{file_name(run.name)}.json"
    return path


# ---- the record -------------------------------------------------------------------------------


def assembled(
    of_seeds: Sequence[list[Run]], costs: dict[str, Costs], verdict: str, args: argparse.Namespace
) -> Record:
    """One table a temperature."""
    parts = by_seed(args)
    results = [
        {run.name: kept(measured_file(run, part), dict)["rows"] for run in runs}
        for part, runs in zip(parts, of_seeds, strict=True)
    ]
    base = args.base or f"of {args.base_steps} steps"
    first = f", SSM 1 from {args.first}" if args.first else ""
    drafters = {
        f"{run.name}, seed {part.seed}": run.folder / "drafter"
        for part, runs in zip(parts, of_seeds, strict=True)
        for run in runs
    }
    rows = [row for at in TEMPERATURES for row in rows_at(of_seeds, results, costs, at, args.draft_length)]
    shown = {head: cell for head, cell in HEADS.items() if any(cell.strip("{}") in row for row in rows)}
    target = load_recipe(str(of_seeds[0][0].folder / "run.yaml")).recipe.target.path
    return record_of(
        args,
        title="Boosted ensembles and their controls",
        target=target_weights(target),
        drafters=drafter_weights(drafters),
        setup=f"Base {base}, {args.steps} steps per SSM{first}; {args.limit} prompts of {args.prompts}, "
        f"{args.max_new_tokens} new tokens, drafts of {args.draft_length}, fp32.",
        intervals="95 % bootstrap intervals over prompts, of what is covered over samples",
        audit={"verdict": verdict, "sees": "of one ensemble; the other arms run the same code"},
        formats=FORMATS,
        rows=rows,
        tables={f"T{at:g}": table_of(shown, {"T": at}) for at in TEMPERATURES},
    )


def listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, out="runs/ensembles")
    parser.add_argument("--base", type=Path, help="a drafter folder in place of a trained base")
    parser.add_argument(
        "--first",
        type=Path,
        metavar="FOLDER",
        help="what SSM 1 begins with, or is, as `draftsmith derive` writes it; default: the base",
    )
    parser.add_argument("--base-recipe", default="distill-tiny")
    parser.add_argument("--base-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=60, help="of every SSM")
    parser.add_argument("--lr", type=float, default=2e-3, help="of every SSM")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--settings", type=listed, default=listed("soft 2, span 2"))
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in listed(text)], default=[2, 4])
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=160, help="at which costs are measured")
    add_decoding(parser, limit=48)
    add_audit(parser, tokens=3_000, sequences=200_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
