"""Every family of drafters on one target: same data, same steps, same prompts, one table.

Each family's recipe is trained for `--steps` steps, once a training seed (a finished run is not
trained again), and once for a single step at a learning rate of 1e-12: its untrained self. Both
draft for held-out prompts, as a chain and as trees of equal numbers of verified tokens. Every arm
that was trained is audited; the untrained ones run the same code and say "not audited". Speed is
measured apart, all shapes of a family and plain decoding in turn on every prompt, unless
`--no-speed`. What is measured is kept family by family in `--out`, so that a run that was cut goes
on where it was; other settings than `--families` and `--seeds` need another `--out`.

    python benchmarks/families.py --out runs/families
    python benchmarks/families.py --out runs/families-100 --families EAGLE-1,Medusa-1 --steps 100
    python benchmarks/families.py --out runs/families-3 --seeds 0,1,2 --no-speed --json families.json
    python benchmarks/families.py --out runs/chat-families --set target.path=runs/target-chat/target
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import audited, decoded, mean, n_alpha
from draftsmith.benchmarks.common.kept import file_name, same_settings
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Figure, Record, figure, table_of
from draftsmith.benchmarks.common.runs import (
    QUIET,
    UNTRAINED,
    add_audit,
    add_decoding,
    by_seed,
    kept,
    parser_of,
    seconds_of,
    settings_of,
    trained,
)
from draftsmith.data.prompts import load_prompts
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.decoding.target.loading import load_target
from draftsmith.drafters.eagle.loading import load_eagle
from draftsmith.drafters.heads.hydra import load_hydra
from draftsmith.drafters.heads.medusa import default_paths, load_medusa
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.arms import NOT_AUDITED, Arm
from draftsmith.eval.measure.evaluate import evaluate
from draftsmith.eval.measure.requests import Request, first_turns, make_requests
from draftsmith.launch.recipe.load import load_recipe

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


@dataclass(frozen=True, eq=False)
class Family:
    """A row of the table: what is trained, and how it drafts."""

    name: str
    recipe: str
    shapes: dict[str, Load]
    behind: str = ""
    """A recipe that takes the first half of the steps, whose drafter this one is initialised from."""


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
    Family("MTP", "mtp-tiny", chain_alone()),
    Family("PARD", "pard-tiny", chain_alone()),
    Family("P-EAGLE", "peagle-tiny", chain_alone()),
    Family("DFlash", "dflash-tiny", chain_alone()),
    Family("DFlash 2", "dflash2-tiny", chain_alone()),
    Family("DSpark", "dspark-tiny", chain_alone()),
]


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("families", "seeds", "json", "train_only"))
    chosen = [with_shapes(each, args.shapes) for each in FAMILIES if each.name in args.families.split(",")]
    parts = by_seed(args)
    for family in chosen:
        for part in parts:
            runs = train(family, part, args.steps), train(family, part, 0)
            if not args.train_only:
                kept(measured_file(family, part), partial(measure, family, *runs, part))
    if not args.train_only:
        record = assembled(chosen, parts, args)
        print(printed(record))
        finish(record, args.json)


def with_shapes(family: Family, shapes: Sequence[str]) -> Family:
    """A family with the shapes that were asked for; its chain always."""
    return replace(family, shapes={name: load for name, load in family.shapes.items() if name in ("chain", *shapes)})


def measured_file(family: Family, args: argparse.Namespace) -> Path:
    """Where a family's measurements of a seed are kept."""
    path: Path = args.out / f"{file_name(family.name)}.json"
    return path


# ---- training ---------------------------------------------------------------------------------


def train(family: Family, args: argparse.Namespace, steps: int) -> Path:
    """The run's folder, trained now if it is not there; `steps` of 0 is the untrained drafter."""
    folder: Path = args.out / "runs" / f"{family.recipe}-{steps}"
    start: dict[str, Any] = {}
    if family.behind and steps:
        first = train(replace(family, recipe=family.behind, behind=""), args, steps // 2)
        start = {"model.start_from": first / "drafter"}
        steps -= steps // 2
        folder = folder.with_name(f"{family.recipe}-{steps}-behind-{family.behind}")
    rows = {"loop.batch_rows": args.batch_rows, "loop.micro_rows": args.batch_rows}
    own = {"loop.steps": steps, **rows, **QUIET, **start, **settings_of(args)}
    return trained(family.recipe, folder, own if steps else own | UNTRAINED)


def target_of(run: Path) -> Backbone:
    """The target that a run's drafter is for: its own where training changed it."""
    tuned = run / "target"
    return load_target(str(tuned) if tuned.is_dir() else load_recipe(str(run / "run.yaml")).recipe.target.path)


# ---- measuring --------------------------------------------------------------------------------


def measure(family: Family, run: Path, fresh: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Sums of every shape, trained and not, at every temperature; the audit; the speed."""
    config = eval_config(args)
    target = target_of(run)
    arms = {name: load(run / "drafter", target) for name, load in family.shapes.items()}
    requests = prompts_of(target, config)
    ids = [each.ids for each in requests]
    audits = {name: audited(target, drafter, first_turns(requests), args) for name, drafter in arms.items()}
    unproven = [name for name, report in audits.items() if report.failures]
    if unproven:
        raise SystemExit(f"{family.name}: the audit failed on {', '.join(unproven)}")
    before = target_of(fresh)
    untrained = family.shapes["chain"](fresh / "drafter", before)
    speeds = evaluate(target, [Arm(*arm) for arm in arms.items()], requests, config)["rows"] if args.speed else []
    return {
        "audits": {name: [report.verdict, report.rosenblatt.detectable] for name, report in audits.items()},
        "trained": {name: at_temperatures(target, drafter, ids, config) for name, drafter in arms.items()},
        "untrained": at_temperatures(before, untrained, ids, config),
        "speeds": {
            f"{row['method']} {row['temperature']:g}": [row["speedup"], row["predicted_speedup"]] for row in speeds
        },
        "run": str(run),
    }


def prompts_of(target: Backbone, config: EvalConfig) -> list[Request]:
    """What every family is asked."""
    return make_requests(target, load_prompts(config.prompts, limit=config.limit, seed=config.seed), config)


def at_temperatures(
    target: Backbone, drafter: Proposer, ids: Sequence[list[int]], config: EvalConfig
) -> dict[str, Any]:
    """Sums of every prompt, by temperature."""
    return {
        f"{temperature:g}": decoded(
            target, drafter, ids, temperature, max_new_tokens=config.max_new_tokens, seed=config.seed
        )
        for temperature in config.temperatures
    }


def eval_config(args: argparse.Namespace) -> EvalConfig:
    return EvalConfig(
        prompts=args.prompts,
        limit=args.limit,
        max_new_tokens=args.max_new_tokens,
        prompt_tokens=args.prompt_tokens,
        draft_length=DEPTH,
        sweep=[],
        repeats=args.repeats,
    )


# ---- the record -------------------------------------------------------------------------------

SHAPES = ("chain", *(f"tree {nodes}" for nodes in NODES))
WIDEST = SHAPES[-1]
FORMATS = {"n_alpha": ".2f", "untrained_chain": ".2f", "sees": ".3f", "seconds": ".0f"}


def assembled(families: Sequence[Family], parts: Sequence[argparse.Namespace], args: argparse.Namespace) -> Record:
    """All families' figures over all seeds, one table a temperature."""
    config = eval_config(args)
    measured = {family: [kept(measured_file(family, part), dict) for part in parts] for family in families}
    names = {
        f"{family.name}, seed {part.seed}": Path(each["run"]) / "drafter"
        for family, of_seeds in measured.items()
        for part, each in zip(parts, of_seeds, strict=True)
    }
    target = load_recipe(families[0].recipe, args.set).recipe.target.path
    trees = "".join(f", {shape} with {DEPTH} levels" for shape in args.shapes if shape != "chain")
    return record_of(
        args,
        title="Families of drafters at equal steps",
        target=target_weights(target),
        drafters=drafter_weights(names),
        setup=f"{args.steps} steps of {args.batch_rows} rows; {args.limit} prompts of {args.prompts}, "
        f"{args.max_new_tokens} new tokens, fp32; a chain of {DEPTH}{trees}.",
        intervals="95 % bootstrap intervals over prompts",
        audit={
            "verdict": "of each row",
            "sees": f"the smallest total variation seen stands behind it; untrained drafters: {NOT_AUDITED}",
        },
        formats=FORMATS
        | {f"{name}_{slug(shape)}": ".2f" for name in ("tau", "speedup", "predicted") for shape in SHAPES},
        rows=[
            row_of(family.name, of_seeds, at) for at in config.temperatures for family, of_seeds in measured.items()
        ],
        tables={f"T{at:g}": table_of(heads(args), {"T": at}) for at in config.temperatures},
    )


def slug(shape: str) -> str:
    return shape.replace(" ", "_")


def row_of(name: str, of_seeds: Sequence[dict[str, Any]], temperature: float) -> dict[str, Any]:
    """A family's cells at a temperature; the verdict is the chain's, and that of all seeds."""
    at = f"{temperature:g}"
    chains = [each["trained"]["chain"][at] for each in of_seeds]
    verdicts = sorted({verdict for each in of_seeds for verdict, _ in each["audits"].values()})
    row: dict[str, Any] = {
        "family": name,
        "T": temperature,
        "untrained_chain": mean([each["untrained"][at] for each in of_seeds], "tau"),
        "n_alpha": n_alpha(chains),
        "verdict": ", ".join(verdicts),
        "sees": max(each["audits"]["chain"][1] for each in of_seeds),
        "seconds": sum(seconds_of(Path(each["run"])) for each in of_seeds) / len(of_seeds),
    }
    for shape in SHAPES:
        own = [each["trained"][shape][at] for each in of_seeds if shape in each["trained"]]
        row[f"tau_{slug(shape)}"] = mean(own, "tau") if own else None
        speeds = [each["speeds"].get(f"{shape} {at}") for each in of_seeds]
        row |= speed_cells(slug(shape), [each for each in speeds if each])
    return row


def speed_cells(shape: str, speeds: Sequence[Any]) -> dict[str, Any]:
    """The speed-up of one run with its interval; of several seeds, no more than their mean and range."""
    if not speeds:
        return {f"speedup_{shape}": None, f"predicted_{shape}": None}
    values = [value for (value, _, _), _ in speeds]
    known = [each for _, each in speeds if each is not None]  # without a step that counts there is none
    predicted = sum(known) / len(known) if known else None
    several = Figure(value=sum(values) / len(values), seeds=values)
    return {f"speedup_{shape}": several if len(values) > 1 else figure(speeds[0][0]), f"predicted_{shape}": predicted}


def heads(args: argparse.Namespace) -> dict[str, str]:
    """Headings and cells of a table; those of the speed where it was measured."""
    shown = [shape for shape in SHAPES if shape in ("chain", *args.shapes)]
    taus = {f"tau {shape}": f"{{tau_{slug(shape)}}}" for shape in shown}
    speeds = {
        f"speed-up {shape} (predicted)": f"{{speedup_{slug(shape)}}} ({{predicted_{slug(shape)}}})"
        for shape in ("chain", WIDEST)
        if shape in shown
    }
    return {
        "family": "{family}",
        **taus,
        "untrained chain": "{untrained_chain}",
        "n-alpha of the chain": "{n_alpha}",
        **(speeds | {"training": "{seconds} s"} if args.speed else {}),
        "verdict": "{verdict} (sees {sees})",
    }


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, out="runs/families")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--families", default=",".join(each.name for each in FAMILIES))
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES), help="the chain always")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--no-speed", dest="speed", action="store_false", help="tau alone, for a machine that is busy")
    parser.add_argument("--repeats", type=int, default=2, help="interleaved rounds of the speed")
    add_decoding(parser, limit=48)
    add_audit(parser, tokens=20_000, sequences=500_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
