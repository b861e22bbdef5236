"""Every family of drafters on one target: same data, same steps, same prompts, one table.

Each family's recipe is trained for `--steps` steps, once a training seed (a finished run is not
trained again), and once for a single step at a learning rate of 1e-12: its untrained self. Both
draft for held-out prompts, as a chain and as trees of equal numbers of verified tokens. Every arm
that was trained is audited; the untrained ones run the same code and say "not audited". Speed is
measured apart, all shapes of a family and plain decoding in turn on every prompt, unless
`--no-speed`. What is measured is kept family by family in `--out`, so that a run that was cut goes
on where it was; other settings than `--families`, `--seeds` and `--wall` need another `--out`.

With `--wall` families are trained for equal time instead: as many steps as fit into so many seconds
by a short timed run of each, which wants the machine for itself. The steps are in the table.

    python benchmarks/families.py --out runs/families
    python benchmarks/families.py --out runs/families-100 --families EAGLE-1,Medusa-1 --steps 100
    python benchmarks/families.py --out runs/families-3 --seeds 0,1,2 --no-speed --json families.json
    python benchmarks/families.py --out runs/families --wall 600
    python benchmarks/families.py --out runs/chat-families --set target.path=runs/target-chat/target
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import at_temperatures, audited, first_gain, mean, n_alpha
from draftsmith.benchmarks.common.equal_time import TIMED, runs_of, steps_within
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
from draftsmith.benchmarks.common.shapes import DEPTH, FAMILIES, SHAPES, Family, with_shapes
from draftsmith.data.prompts import load_prompts
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.arms import NOT_AUDITED, Arm
from draftsmith.eval.measure.evaluate import evaluate
from draftsmith.eval.measure.requests import Request, first_turns, make_requests
from draftsmith.launch.recipe.load import load_recipe


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("families", "seeds", "json", "train_only", "wall"))
    chosen = [with_shapes(each, args.shapes) for each in FAMILIES if each.name in args.families.split(",")]
    parts = by_seed(args)
    for family in chosen:
        steps = steps_of(family, parts[0])
        for part in parts:
            runs = train(family, part, steps), train(family, part, 0)
            if not args.train_only:
                kept(measured_file(family, part), partial(measure, family, *runs, part))
    if not args.train_only:
        record = assembled(chosen, parts, args)
        print(printed(record))
        finish(record, args.json)


def measured_file(family: Family, args: argparse.Namespace) -> Path:
    """Where a family's measurements of a seed are kept."""
    path: Path = args.out / f"{file_name(family.name)}{in_time(args)}.json"
    return path


def in_time(args: argparse.Namespace) -> str:
    """What marks files of runs of equal time."""
    return f"-wall-{args.wall:g}" if args.wall else ""


# ---- training ---------------------------------------------------------------------------------


def steps_of(family: Family, args: argparse.Namespace) -> int:
    """Steps that a family is trained for: those asked for, or as many as fit; one number for all seeds."""
    if not args.wall:
        return int(args.steps)
    place = args.root / f"{file_name(family.name)}{in_time(args)}-steps.json"
    return steps_within(
        args.wall, place, lambda steps: runs_of(train(family, args, steps), behind=bool(family.behind))
    )


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
        "passes": {f"{row['method']} {row['temperature']:g}": [row["c"], row["draft_steps"]] for row in speeds},
        "run": str(run),
    }


def prompts_of(target: Backbone, config: EvalConfig) -> list[Request]:
    """What every family is asked."""
    return make_requests(target, load_prompts(config.prompts, limit=config.limit, seed=config.seed), config)


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

WIDEST = SHAPES[-1]
BESIDE_BLOCKS = "EAGLE-3"
FORMATS = {"n_alpha": ".2f", "untrained_chain": ".2f", "sees": ".3f", "seconds": ".0f", "steps": ".0f"}
FORMATS |= {"c_chain": ".2f", "passes_chain": ".1f", "n_alpha_less_eagle3": "+.2f"}


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
        title=f"Families of drafters at equal {'training time' if args.wall else 'steps'}",
        target=target_weights(target),
        drafters=drafter_weights(names),
        setup=f"{steps_in_words(args)} of {args.batch_rows} rows; {args.limit} prompts of {args.prompts}, "
        f"{args.max_new_tokens} new tokens, fp32; a chain of {DEPTH}{trees}.",
        intervals="95 % bootstrap intervals over prompts",
        audit={
            "verdict": "of each row",
            "sees": f"the smallest total variation seen stands behind it; untrained drafters: {NOT_AUDITED}",
        },
        formats=FORMATS
        | {f"{name}_{slug(shape)}": ".2f" for name in ("tau", "speedup", "predicted") for shape in SHAPES},
        rows=[
            row_of(family, of_seeds, at) | {"steps": steps_of(family, parts[0])} | gate(family, measured, at)
            for at in config.temperatures
            for family, of_seeds in measured.items()
        ],
        tables={f"T{at:g}": table_of(heads(args, families), {"T": at}) for at in config.temperatures},
    )


def steps_in_words(args: argparse.Namespace) -> str:
    if not args.wall:
        return f"{args.steps} steps"
    return f"as many steps as fit into {args.wall:g} s of training by {TIMED} timed ones of each family, each"


def slug(shape: str) -> str:
    return shape.replace(" ", "_")


def gate(family: Family, measured: dict[Family, list[dict[str, Any]]], temperature: float) -> dict[str, Figure | None]:
    """Of a block drafter, how much more often its first draft is accepted than EAGLE-3's: the same inputs."""
    sums = {each.name: [one["trained"]["chain"][f"{temperature:g}"] for one in of] for each, of in measured.items()}
    known = family.block and BESIDE_BLOCKS in sums
    return {"n_alpha_less_eagle3": first_gain(sums[family.name], sums[BESIDE_BLOCKS]) if known else None}


def row_of(family: Family, of_seeds: Sequence[dict[str, Any]], temperature: float) -> dict[str, Any]:
    """A family's cells at a temperature; the verdict is the chain's, and that of all seeds."""
    at = f"{temperature:g}"
    chains = [each["trained"]["chain"][at] for each in of_seeds]
    verdicts = sorted({verdict for each in of_seeds for verdict, _ in each["audits"].values()})
    row: dict[str, Any] = {
        "family": family.name,
        "T": temperature,
        "untrained_chain": mean([each["untrained"][at] for each in of_seeds], "tau"),
        "n_alpha": n_alpha(chains),
        "verdict": ", ".join(verdicts),
        "sees": max(each["audits"]["chain"][1] for each in of_seeds),
        "seconds": sum(training_seconds(family, Path(each["run"])) for each in of_seeds) / len(of_seeds),
        **passes([each.get("passes", {}).get(f"chain {at}") for each in of_seeds]),
    }
    for shape in SHAPES:
        own = [each["trained"][shape][at] for each in of_seeds if shape in each["trained"]]
        row[f"tau_{slug(shape)}"] = mean(own, "tau") if own else None
        speeds = [each["speeds"].get(f"{shape} {at}") for each in of_seeds]
        row |= speed_cells(slug(shape), [each for each in speeds if each])
    return row


def training_seconds(family: Family, run: Path) -> float:
    """What training took, that of the drafter it began with included."""
    return sum(seconds_of(each) for each in runs_of(run, behind=bool(family.behind)))


def passes(of_seeds: Sequence[list[float] | None]) -> dict[str, float | None]:
    """What a pass of drafting the chain costs and how many a draft takes; None where no speed was measured."""
    known = [each for each in of_seeds if each]
    costs, steps = ([each[at] for each in known] for at in (0, 1))
    names = ("c_chain", "passes_chain")
    return {name: sum(values) / len(values) if values else None for name, values in zip(names, (costs, steps))}


def speed_cells(shape: str, speeds: Sequence[Any]) -> dict[str, Any]:
    """The speed-up of one run with its interval; of several seeds, no more than their mean and range."""
    values = [value for (value, _, _), _ in speeds if value is not None]  # where all answers end at once there is none
    if not values:
        return {f"speedup_{shape}": None, f"predicted_{shape}": None}
    known = [each for _, each in speeds if each is not None]  # without a step that counts there is none
    predicted = sum(known) / len(known) if known else None
    several = Figure(value=sum(values) / len(values), seeds=values)
    return {f"speedup_{shape}": several if len(values) > 1 else figure(speeds[0][0]), f"predicted_{shape}": predicted}


def heads(args: argparse.Namespace, families: Sequence[Family]) -> dict[str, str]:
    """Headings and cells of a table; those of the speed where it was measured."""
    gated = any(each.block for each in families) and any(each.name == BESIDE_BLOCKS for each in families)
    gap = {f"depth 1 less {BESIDE_BLOCKS}'s": "{n_alpha_less_eagle3}"} if gated else {}
    cost = {"target calls of a draft (c x passes)": "{c_chain} x {passes_chain}"} if args.speed else {}
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
        **gap,
        **(speeds if args.speed else {}),
        **cost,
        **({"steps": "{steps}"} if args.wall else {}),
        "training": "{seconds} s",
        "verdict": "{verdict} (sees {sees})",
    }


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, out="runs/families")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--wall", type=float, metavar="SECONDS", help="of training, in place of --steps")
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
