"""Every family of drafters on one target: same data, same steps, same prompts, one table.

Each family's recipe is trained for `--steps` steps (a finished run is not trained again), and once
for a single step at a learning rate of 1e-12: its untrained self. Both draft for held-out prompts,
as a chain and as trees of equal numbers of verified tokens, all shapes of a family and plain
decoding in turn on every prompt. Every arm is audited. What is measured is kept family by family
in `--out`, so that a run that was cut goes on where it was; other settings than `--families` need
another `--out`.

    python benchmarks/families.py --out runs/families
    python benchmarks/families.py --out runs/families-100 --families EAGLE-1,Medusa-1 --steps 100
    python benchmarks/families.py --out runs/chat-families --set target.path=runs/target-chat/target
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from draftsmith.benchmarks.kept import file_name, is_finished, same_settings
from draftsmith.data.prompts import Prompt, load_prompts
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.decoding.target.loading import load_target
from draftsmith.drafters.eagle.proposer import load_eagle
from draftsmith.drafters.heads.hydra import load_hydra
from draftsmith.drafters.heads.medusa import default_paths, load_medusa
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.audit.audit import AuditReport, audit
from draftsmith.eval.config import AuditConfig, EvalConfig
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.environment import environment
from draftsmith.eval.measure.evaluate import evaluate
from draftsmith.eval.measure.requests import first_turns, make_requests
from draftsmith.eval.report.tables import MISSING, number
from draftsmith.eval.report.tables import interval as shown
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.storage import write_text

DEPTH = 4  # drafted tokens of a chain, depth of every tree
CHAIN = [[0] * depth for depth in range(1, DEPTH + 1)]
NODES = (DEPTH + 1, 20)  # of the trees; the first verifies as many tokens as the chain

Load = Callable[[Path, Backbone], Proposer]


def paths(nodes: int) -> list[list[int]]:
    """The default static tree of so many nodes."""
    return [list(path) for path in default_paths(DEPTH, nodes)]


def on_paths(load: Callable[..., Proposer], **settings: Any) -> dict[str, Load]:
    """A chain and static trees for what fills any static tree."""
    shapes = {"chain": CHAIN, **{f"tree {nodes}": paths(nodes) for nodes in NODES}}
    return {name: partial(load, paths=shape, **settings) for name, shape in shapes.items()}


def dynamic() -> dict[str, Load]:
    """A chain, and trees by confidence."""
    load = partial(load_eagle, draft_length=DEPTH)
    trees = {f"tree {nodes}": partial(load, tree="dynamic", nodes=nodes, top_k=min(10, nodes)) for nodes in NODES}
    return {"chain": partial(load, tree="chain"), **trees}


def eagle_1() -> dict[str, Load]:
    """A chain, and static trees with siblings drawn without replacement."""
    trees = on_paths(load_eagle, tree="static")
    return {**trees, "chain": dynamic()["chain"]}


def chain_alone() -> dict[str, Load]:
    """What drafts a chain and nothing else."""
    return {"chain": partial(load_drafter, draft_length=DEPTH)}


@dataclass(frozen=True)
class Family:
    """A row of the table: what is trained, and how it drafts."""

    name: str
    recipe: str
    shapes: dict[str, Load]
    behind: str = ""
    """A recipe that takes the first half of the steps, from whose drafter this one goes on."""


FAMILIES = [
    Family("distilled draft", "distill-tiny", chain_alone()),
    Family("BPD (frozen)", "bpd-tiny", chain_alone()),
    Family("BPD (fine-tuned)", "bpd-tuned-tiny", chain_alone()),
    Family("Medusa-1", "medusa-tiny", on_paths(load_medusa)),
    Family("Medusa-2", "medusa2-tiny", on_paths(load_medusa)),
    Family("Hydra", "hydra-tiny", on_paths(load_hydra)),
    Family("Hydra++", "hydra-plus-tiny", on_paths(load_hydra)),
    Family("EAGLE-1", "eagle-tiny", eagle_1()),
    Family("EAGLE-2", "eagle-tiny", dynamic()),
    Family("HASS", "hass-tiny", dynamic()),
    Family("HASS behind EAGLE-1", "hass-tiny", dynamic(), behind="eagle-tiny"),
    Family("EAGLE-3", "eagle3-tiny", dynamic()),
]


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("families", "train_only"))
    chosen = [each for each in FAMILIES if each.name in args.families.split(",")]
    for family in chosen:
        measured = args.out / f"{file_name(family.name)}.json"
        if measured.is_file():
            continue
        trained, fresh = train(family, args, args.steps), train(family, args, 0)
        if not args.train_only:
            write_text(measured, json.dumps(measure(family, trained, fresh, args), indent=1) + "\n")
    if not args.train_only:
        found = [json.loads((args.out / f"{file_name(family.name)}.json").read_text()) for family in chosen]
        print("\n".join(table(found, args)))


def train(family: Family, args: argparse.Namespace, steps: int) -> Path:
    """The run's folder, trained now if it is not there; `steps` of 0 is the untrained drafter."""
    folder: Path = args.out / "runs" / f"{family.recipe}-{steps}"
    begin: dict[str, str] = {}
    if family.behind and steps:
        first = train(replace(family, recipe=family.behind, behind=""), args, steps // 2)
        begin = {"model.start_from": str(first / "drafter")}
        steps -= steps // 2
        folder = folder.with_name(f"{family.recipe}-{steps}-behind-{family.behind}")
    if is_finished(folder):
        return folder
    values = {
        "loop.steps": str(max(1, steps)),
        "loop.batch_rows": str(args.batch_rows),
        "loop.micro_rows": str(args.batch_rows),
        "loop.validate_every": "100000",
        "loop.validate_rows": "4",
        "probe.every_steps": "",
        "probe.prompts": "2",
        **begin,
        **dict(args.set),
    }
    if steps == 0:
        values |= {"optimizer.lr": "1e-12", "optimizer.warmup_steps": "0"}
    words = [word for key, value in values.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "draftsmith.launch.train", family.recipe]
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        done = subprocess.run(
            [*command, "--out", str(folder), *words], stdout=stream, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise SystemExit(f"{family.name}: training failed, see {log}")
    return folder


def measure(family: Family, trained: Path, fresh: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Rows of results for every shape, trained and not, at every temperature."""
    config = EvalConfig(
        prompts=args.prompts,
        limit=args.limit,
        max_new_tokens=args.max_new_tokens,
        prompt_tokens=args.prompt_tokens,
        draft_length=DEPTH,
        sweep=[],
        repeats=args.repeats,
    )
    prompts = load_prompts(config.prompts, limit=config.limit, seed=config.seed)
    rows = _rows(family, trained, prompts, config, args)
    unproven = [row["method"] for row in rows if row["verdict"] != "lossless"]
    if unproven:
        raise SystemExit(f"{family.name}: the audit failed on {', '.join(unproven)}")
    once = config.model_copy(update={"repeats": 1})
    untrained = _rows(family, fresh, prompts, once, args, audited=rows)
    return {
        "family": family.name,
        "steps": args.steps,
        "trained": rows,
        "untrained": untrained,
        "settings": config.model_dump(),
        "environment": environment(),
    }


def _rows(
    family: Family,
    run: Path,
    prompts: Sequence[Prompt],
    config: EvalConfig,
    args: argparse.Namespace,
    audited: Sequence[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """One row per shape and temperature; with the verdicts of `audited`, the same code's rows with other weights."""
    target = target_of(run)
    requests = make_requests(target, prompts, config)
    arms = [Arm(name, load(run / "drafter", target)) for name, load in family.shapes.items()]
    sees: dict[str, float] = {}
    if audited is None:
        reports = [_audited(target, arm, first_turns(requests), args) for arm in arms]
        arms = [replace(arm, verdict=each.verdict) for arm, each in zip(arms, reports, strict=True)]
        sees = {arm.name: each.rosenblatt.detectable for arm, each in zip(arms, reports)}
    else:
        verdicts = {row["method"]: row["verdict"] for row in audited}
        arms = [replace(arm, verdict=verdicts[arm.name], audited_as=f"trained {arm.name}") for arm in arms]
    rows: list[dict[str, Any]] = evaluate(target, arms, requests, config)["rows"]
    return [row | {"sees": sees.get(row["method"])} for row in rows]


def _audited(target: Backbone, arm: Arm, ids: Sequence[list[int]], args: argparse.Namespace) -> AuditReport:
    evidence = AuditConfig(tokens=args.audit_tokens, sequences=args.audit_sequences, prompts=min(24, len(ids)))
    return audit(target, arm.drafter, ids, evidence)


def target_of(run: Path) -> Backbone:
    """The target that a run's drafter is for: its own where training changed it."""
    tuned = run / "target"
    named = load_recipe(str(run / "run.yaml")).recipe.target
    return load_target(str(tuned) if tuned.is_dir() else named.path)


def table(found: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """Markdown: one table per temperature."""
    place = found[0]["environment"]
    settings = found[0]["settings"]
    lines = [
        f"{place['processor']}, {place['threads']} threads, torch {torch.__version__}; "
        f"{args.steps} steps of {args.batch_rows} rows; {settings['limit']} prompts of "
        f"{settings['prompts']}, {settings['max_new_tokens']} new tokens, fp32; 95 % intervals "
        "over prompts."
    ]
    for temperature in settings["temperatures"]:
        lines += ["", f"T = {temperature:g}", "", *_table_at(found, temperature)]
    return lines


def _table_at(found: Sequence[dict[str, Any]], temperature: float) -> list[str]:
    columns = ["chain", *(f"tree {nodes}" for nodes in NODES)]
    head = [
        "family",
        *(f"tau {name}" for name in columns),
        "untrained chain",
        "n-alpha of the chain",
        "speed-up chain (predicted)",
        f"speed-up {columns[-1]} (predicted)",
        "verdict",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for each in found:
        own = {r["method"]: r for r in each["trained"] if r["temperature"] == temperature}
        before = {r["method"]: r for r in each["untrained"] if r["temperature"] == temperature}
        cells = [
            each["family"],
            *(interval(own.get(name), "tau") for name in columns),
            interval(before["chain"], "tau"),
            " ".join(number(value) for value, *_ in own["chain"]["n_alpha"]),
            speed(own["chain"]),
            speed(own.get(columns[-1])),
            proven(own["chain"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def interval(row: dict[str, Any] | None, name: str) -> str:
    return MISSING if row is None else shown(row[name])


def proven(row: dict[str, Any]) -> str:
    """The verdict, and the smallest bias (a total variation) that its audit would have seen."""
    sees = row.get("sees")
    return str(row["verdict"]) + ("" if sees is None else f" (sees {sees:.3f})")


def speed(row: dict[str, Any] | None) -> str:
    if row is None:
        return MISSING
    return f"{interval(row, 'speedup')} ({number(row['predicted_speedup'])})"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/families"))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--families", default=",".join(each.name for each in FAMILIES))
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--prompts", default="stdlib")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument(
        "--prompt-tokens", type=int, default=128, help="texts are cut to their last ones, longer chats are left out"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--audit-tokens", type=int, default=20_000)
    parser.add_argument("--audit-sequences", type=int, default=500_000)
    parser.add_argument(
        "--set",
        type=lambda word: tuple(word.split("=", 1)),
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="a value for every family's recipe",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
