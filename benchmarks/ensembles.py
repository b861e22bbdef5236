"""Boost-tuned ensembles against their honest controls: copies with other seeds, and one larger SSM.

A base draft is distilled once, and one of n times its parameters for every n of `--sizes`. From
the base every arm tunes its SSMs for `--steps` steps each on the same continuations of the target:

  copies      each on all of them, seeds differ: the gain of any ensemble
  boosted     each on what those before it miss, by every setting of `--settings`; a setting may
              change other values too ("soft 2 continuation=64 samples=2048"), fields of boost
              or, with a dot, of any section: a sweep of the options
  n x size    one SSM of n times the parameters, as many steps: as much work in all

SSM 1 is the same in all arms but the last, and those that change more than what counts as covered
and for how much. The first n SSMs of an arm decode held-out prompts as
an ensemble, n = 1 up to `--members`. What is printed: coverage of held-out continuations by the
union, tau (tokens per target call), tokens verified per call, the speed-up that the speed model
predicts from costs measured here, and boosted - copies (those of the same other values, where there
are), paired over prompts; 95 % intervals over prompts, of coverage over samples. Everything is kept
in `--out`, so that a run that was cut goes on where it was; arms may be added, other settings need
another `--out`. With `--first` SSM 1 of copies and boosted begins in another folder than the
others, for example a quantised copy of the target that is taken as it stands: what a further SSM is
worth behind one that covers much. Its costs differ from the others', so no speed-up is predicted.

    python benchmarks/ensembles.py --out runs/ensembles
    python benchmarks/ensembles.py --settings "span 4,soft 4,soft 2 temperature=1" --sizes ""
    python benchmarks/ensembles.py --out runs/ensembles-chat --prompts prompts.jsonl \\
        --set data.source=chats --set target.path=runs/target-chat/target
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftsmith.benchmarks.kept import file_name, is_finished, same_settings
from draftsmith.data.prompts import load_prompts
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.decoding.target.loading import load_target
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.config import AuditConfig, EvalConfig
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.environment import environment
from draftsmith.eval.measure.metrics import Floats, Interval, difference, ratio
from draftsmith.eval.measure.requests import make_requests
from draftsmith.eval.measure.rounds import decode
from draftsmith.eval.measure.speed import Costs, measure_costs
from draftsmith.eval.report.tables import interval
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.storage import write_text
from draftsmith.trainers.boosting.coverage import acceptance
from draftsmith.trainers.config import BoostConfig
from safetensors.torch import load_file

TEMPERATURES = (0.0, 1.0)
AUDITED = (0.6, 1.0)  # every audit replays greedy text, T = 0, too
# what is said of every arm, however it was trained
SPANS = BoostConfig(unit="span", match_tokens=4)
WHOLE = BoostConfig(unit="sample", match_tokens=0)
COPIES = "copies"
# values on which the continuations depend, and those that leave SSM 1 as it is
SAMPLES = ("samples", "held_out", "prompt_tokens", "continuation", "temperature", "seed")
WEIGHING = ("weights", "unit", "match_tokens", "soft", "start_from")


@dataclass(frozen=True)
class Run:
    """A line of SSMs, decoded as ensembles of the first n."""

    name: str
    folder: Path
    counts: tuple[int, ...]
    """Of SSMs that decode together."""
    costs_like: str
    """Whose step of drafting it takes, once for each SSM."""
    own_first: bool = False
    """SSM 1 is another than that of the copies."""


# ---- training ---------------------------------------------------------------------------------


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("settings", "sizes", "members", "train_only"))
    runs = train_all(args)
    if args.train_only:
        return
    target = target_of(runs[0].folder)
    costs = {} if args.first else all_costs(runs, target, args)
    for run in runs:
        measure(run, target, args)
    verdict = audited(runs[-1 if len(runs) == 1 else 1], target, args)
    print("\n".join(table(runs, costs, verdict, args)))


def train_all(args: argparse.Namespace) -> list[Run]:
    """Every arm's run, those that are finished as they are."""
    base = args.base or train(args, "base", args.base_recipe, base_values(args)) / "drafter"
    numbers = tuple(range(1, args.members + 1))
    arms = {COPIES: {"boost.weights": "none"}, **{each: setting(each) for each in args.settings}}
    runs = []
    for name, values in arms.items():
        places = [args.first or base, *[base] * (args.members - 1)]
        origins = json.dumps([str(place.resolve()) for place in places])
        folder = boost(args, name, {**values, "boost.start_from": origins}, args.members)
        runs.append(Run(name, folder, numbers, "base", own_first=not shares_first(values)))
    for n in args.sizes:
        sizes = larger(args, n)
        big = train(args, f"base-{n}", args.base_recipe, {**base_values(args), **sizes}) / "drafter"
        own = {"boost.weights": "none", "boost.start_from": json.dumps([str(big.resolve())])}
        runs.append(Run(f"{n} x size", boost(args, f"size {n}", own, 1), (1,), f"base-{n}"))
    return runs


def setting(words: str) -> dict[str, str]:
    """`span 4`, `sample 8`, `sample 0`: hard, the unit and its tokens; `soft 2` weighs spans;
    `copies` weighs nothing. Other values follow as `field=value`."""
    kind, *others = words.split()
    tokens = others.pop(0) if kind != COPIES and others else ""
    if kind not in ("span", "sample", "soft", COPIES) or tokens.isdigit() == (kind == COPIES):
        raise SystemExit(f"--settings: {words!r}; expected span M, sample M, soft M or copies")
    if any("=" not in other for other in others):
        raise SystemExit(f"--settings: {words!r}; after the tokens, field=value was expected")
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


def base_values(args: argparse.Namespace) -> dict[str, str]:
    """Of a base draft."""
    return {
        "loop.steps": str(args.base_steps),
        "loop.validate_every": "100000",
        "probe.every_steps": "",
        **chosen(args, boosted=False),
    }


def boost(args: argparse.Namespace, name: str, values: dict[str, str], members: int) -> Path:
    """A run of method boost; copies' SSM 1 and continuations are taken over where they fit."""
    folder: Path = args.out / "runs" / file_name(name)
    first = args.out / "runs" / file_name(COPIES) / "ssm-1"
    if is_finished(folder) and not (folder / f"ssm-{members}").exists():
        raise too_few(folder, members)
    takes_over = members > 1 and name != COPIES and shares_first(values)
    if takes_over and not (folder / "ssm-1").exists():
        staging = folder.with_name(f".staging-{folder.name}")
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(first, staging)
        folder.mkdir(parents=True, exist_ok=True)
        staging.rename(folder / "ssm-1")
    shared = {
        "boost.members": str(members),
        "boost.stop_share": "0",
        "boost.continuations": str(args.out.resolve() / samples_of(values)),
        "loop.steps": str(args.steps),
        "optimizer.lr": str(args.lr),
        "optimizer.warmup_steps": str(min(10, args.steps // 4)),
        "loop.validate_every": "100000",
        "probe.every_steps": "",
        "probe.prompts": "2",
    }
    return train(args, name, "boost-tiny", {**shared, **chosen(args, boosted=True), **values})


def chosen(args: argparse.Namespace, *, boosted: bool) -> dict[str, str]:
    """What `--set` asks for; `boost.` values are for runs of that method alone."""
    return {key: value for key, value in args.set if boosted or not key.startswith("boost.")}


def larger(args: argparse.Namespace, n: int) -> dict[str, str]:
    """The hidden size with about n times the base's parameters, its other ratios kept."""
    recipe = load_recipe(args.base_recipe, list(chosen(args, boosted=False).items())).recipe
    vocabulary = load_target(recipe.target.path).vocabulary
    model = recipe.model
    hidden, layers = model.hidden or 128, model.layers or 1
    attention = 2 * ((model.heads or 2) + (model.kv_heads or 2)) * (model.head_size or 64)
    spread = (model.intermediate or 3 * hidden) / hidden

    def count(size: int) -> float:
        return vocabulary * size + layers * (attention * size + 3 * spread * size * size)

    wanted = n * count(hidden)
    found = min(range(hidden, 16 * hidden, 8), key=lambda size: abs(count(size) - wanted))
    return {"model.hidden": str(found), "model.intermediate": str(int(spread * found))}


def train(args: argparse.Namespace, name: str, recipe: str, values: dict[str, str]) -> Path:
    """The run's folder, trained now if it is not finished."""
    folder: Path = args.out / "runs" / file_name(name)
    if is_finished(folder):
        return folder
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [word for key, value in values.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "draftsmith.launch.train", recipe, "--out", str(folder)]
    with log.open("w") as stream:
        done = subprocess.run([*command, *words], stdout=stream, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: training failed, see {log}")
    return folder


def too_few(place: Path, members: int) -> SystemExit:
    """What ends a call for more SSMs than were kept: the first ones serve fewer, not more."""
    return SystemExit(
        f"{place} has fewer SSMs than the {members} of --members. Name another --out, or remove this one"
    )


# ---- measuring --------------------------------------------------------------------------------


def measure(run: Run, target: Backbone, args: argparse.Namespace) -> None:
    """Steps and emitted tokens of every prompt, for every n and temperature, into a file."""
    place = measured_file(run, args)
    if place.is_file():
        if json.loads(place.read_text())["rows"][-1]["members"] < run.counts[-1]:
            raise too_few(place, run.counts[-1])
        return
    config = eval_config(args)
    prompts = load_prompts(config.prompts, limit=config.limit, seed=config.seed)
    requests = make_requests(target, prompts, config)
    rows = []
    for n in run.counts:
        drafter = load_drafter(
            run.folder / "drafter", target, draft_length=args.draft_length, config=DrafterConfig(members=n)
        )
        for temperature in TEMPERATURES:
            arm = Arm(run.name, drafter)
            (found,) = decode(target, [(arm, None)], requests, config, temperature)
            rows.append(
                {
                    "members": n,
                    "temperature": temperature,
                    "nodes": [each.nodes for each in found.generations],
                    "calls": [each.target_calls for each in found.generations],
                    "steps": [each.steps for each in found.counts],
                    "emitted": [each.emitted for each in found.counts],
                }
            )
    write_text(place, json.dumps({"rows": rows, "environment": environment()}) + "\n")


def all_costs(runs: Sequence[Run], target: Backbone, args: argparse.Namespace) -> dict[str, Costs]:
    """By what they are like; verify calls are the target's own, so one measurement serves all."""
    costs = {run.costs_like: measured_costs(run, target, args) for run in runs}
    return {name: replace(found, c_v=costs["base"].c_v) for name, found in costs.items()}


def measured_costs(run: Run, target: Backbone, args: argparse.Namespace) -> Costs:
    """Times of verify calls and of a step of one of the run's SSMs, measured once."""
    place: Path = args.out / f"costs-{file_name(run.costs_like)}.json"
    if not place.is_file():
        draft = load_target(str(run.folder / "drafter" / "ssm-1"))
        widest = 1 + args.draft_length * args.members
        sizes = sorted({1, 2, 4, 8, 12, args.draft_length, widest - 1})
        found = measure_costs(target, draft, sizes, context=args.context)
        write_text(place, json.dumps([found.target_call_seconds, found.c, found.c_v]) + "\n")
    seconds, c, c_v = json.loads(place.read_text())
    return Costs(seconds, c, {int(nodes): cost for nodes, cost in c_v.items()})


def audited(run: Run, target: Backbone, args: argparse.Namespace) -> str:
    """The verdicts of the audit on a whole ensemble, its greedy text replayed in each; the other
    arms are the same code."""
    place: Path = args.out / "audit.json"
    if not place.is_file():
        config = eval_config(args)
        prompts = load_prompts(config.prompts, limit=config.limit, seed=config.seed)
        ids = [each.ids for each in make_requests(target, prompts, config)]
        drafter = load_drafter(run.folder / "drafter", target, draft_length=args.draft_length)
        verdicts = {}
        for temperature in AUDITED:
            evidence = AuditConfig(
                tokens=args.audit_tokens,
                sequences=args.audit_sequences,
                prompts=min(24, len(ids)),
                temperature=temperature,
            )
            verdicts[f"T = {temperature:g}"] = audit(target, drafter, ids, evidence).verdict
        write_text(place, json.dumps(verdicts) + "\n")
    said = json.loads(place.read_text())
    return ", ".join(f"{verdict} at {where}" for where, verdict in said.items())


def coverage(run: Run, n: int) -> list[Interval]:
    """Shares of held-out spans of 4, and of whole continuations, that the first n SSMs cover
    together; intervals over samples."""
    kept = load_recipe(str(run.folder / "run.yaml")).recipe.boost.continuations
    parts = sorted(Path(str(kept)).glob("part-*.safetensors"))
    found = [load_file(run.folder / f"ssm-{k}" / "coverage.safetensors")["validation"] for k in range(1, n + 1)]
    # held-out samples come first in the parts
    label_RS = torch.cat([load_file(part)["labels"] for part in parts])[: len(found[0])]
    shares = []
    for unit in (SPANS, WHOLE):
        best_RS = torch.stack([acceptance(each, label_RS, unit) for each in found]).amax(0)
        covered_RS = label_RS & (best_RS >= 1)
        shares.append(ratio(covered_RS.sum(1).double().numpy(), label_RS.sum(1).double().numpy()))
    return shares


def target_of(run: Path) -> Backbone:
    """The target of a run."""
    return load_target(load_recipe(str(run / "run.yaml")).recipe.target.path)


def eval_config(args: argparse.Namespace) -> EvalConfig:
    return EvalConfig(
        prompts=args.prompts,
        limit=args.limit,
        max_new_tokens=args.max_new_tokens,
        prompt_tokens=args.prompt_tokens,
        draft_length=args.draft_length,
        sweep=[],
        repeats=1,
        batch=args.batch,
    )


def measured_file(run: Run, args: argparse.Namespace) -> Path:
    place: Path = args.out / f"measured-{file_name(run.name)}.json"
    return place


# ---- the table --------------------------------------------------------------------------------


def table(runs: Sequence[Run], costs: dict[str, Costs], verdict: str, args: argparse.Namespace) -> list[str]:
    """Markdown: one table per temperature."""
    found = {run.name: json.loads(measured_file(run, args).read_text()) for run in runs}
    place = found[COPIES]["environment"]
    lines = [
        f"{place['processor']}, {place['threads']} threads, torch {torch.__version__}; base "
        f"{args.base or f'of {args.base_steps} steps'}, {args.steps} steps per SSM"
        f"{f', SSM 1 from {args.first}' if args.first else ''}; "
        f"{args.limit} prompts of {args.prompts}, {args.max_new_tokens} new tokens, "
        f"drafts of {args.draft_length}, fp32; audit of the ensemble: {verdict}; 95 % intervals "
        "over prompts, of what is covered over samples."
    ]
    for temperature in TEMPERATURES:
        rows = _table_at(runs, found, costs, temperature, args.draft_length)
        lines += ["", f"T = {temperature:g}", "", *rows]
    return lines


def _table_at(
    runs: Sequence[Run], found: dict[str, Any], costs: dict[str, Costs], temperature: float, length: int
) -> list[str]:
    head = [
        "SSMs",
        "n",
        "spans of 4 covered",
        "whole continuations",
        "tau",
        "verified per call",
        "predicted speed-up",
        "tau - copies",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    rows = {
        (run.name, row["members"]): row
        for run in runs
        for row in found[run.name]["rows"]
        if row["temperature"] == temperature
    }
    for run, n in _cells(runs):
        row = rows[run.name, n]
        spans, whole = coverage(run, n)
        nodes = ratio(np.array(row["nodes"], float), np.array(row["calls"], float))
        tau = ratio(*pair(row))
        size = int(run.name.split()[0]) if run.costs_like != "base" else n
        other = rows.get((control(run, runs), size))
        cells = [
            run.name,
            str(n),
            share(spans),
            share(whole),
            shown(tau),
            shown(nodes),
            predicted(tau, nodes.value, length * n, costs.get(run.costs_like)),
            "" if other is None or other is row else shown(less(row, other)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def predicted(tau: Interval, nodes: float, draft_steps: int, cost: Costs | None) -> str:
    """The speed-up over plain decoding, by the speed model."""
    if cost is None:
        return ""
    work = cost.verify(nodes) + draft_steps * (cost.c or 0.0)
    return shown(Interval(tau.value / work, tau.low / work, tau.high / work))


def _cells(runs: Sequence[Run]) -> Iterator[tuple[Run, int]]:
    """From n = 1 with an SSM 1 of its own, what shares that of the copies from n = 2."""
    for run in runs:
        for n in run.counts:
            if n > 1 or run.name == COPIES or run.own_first or len(run.counts) == 1:
                yield run, n


def control(run: Run, runs: Sequence[Run]) -> str:
    """The copies that an arm is compared with: those with its own other values, where there are."""
    kind, *words = run.name.split()
    same = " ".join([COPIES, *words[1:]])
    boosted = kind != COPIES and run.costs_like == "base"
    return same if boosted and same in {each.name for each in runs} else COPIES


def less(mine: dict[str, Any], other: dict[str, Any]) -> Interval:
    """tau - tau on the same prompts."""
    return difference(pair(mine), pair(other))


def pair(row: dict[str, Any]) -> tuple[Floats, Floats]:
    """Tokens and calls of every prompt, [R] each."""
    return np.array(row["emitted"], float), np.array(row["steps"], float)


def shown(found: Interval) -> str:
    return interval(found.to_list())


def share(found: Interval) -> str:
    return f"{found.value:.1%} [{found.low:.1%}, {found.high:.1%}]"


def listed(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/ensembles"))
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
    parser.add_argument("--sizes", type=lambda words: [int(n) for n in listed(words)], default=[2, 4])
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--prompts", default="stdlib")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument(
        "--prompt-tokens", type=int, default=128, help="texts are cut to their last ones, longer chats are left out"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=160, help="at which costs are measured")
    parser.add_argument("--audit-tokens", type=int, default=3_000)
    parser.add_argument("--audit-sequences", type=int, default=200_000)
    parser.add_argument(
        "--set",
        type=lambda word: tuple(word.split("=", 1)),
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="a value for every recipe; boost. for the SSMs alone",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
