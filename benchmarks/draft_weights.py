"""Which drafts count in training: every value of `objective.positions`, from one drafter, on the target's own words.

A drafter of each family is trained by its recipe for `--start-steps` steps, once a training seed, and from there with
every arm for `--steps` more: as shipped, as shipped for half as many steps again (what a longer step would have been
worth), with LK alone, and by how far drafts get; asked for, along its own drafts (`rollouts`). The rows are what the
target writes at temperature 1 behind windows of training texts, as `on-policy` needs them. Each arm drafts chains for
held-out prompts of the corpus, at T = 0 and 1, and is audited with its first seed; `--shape "tree 20"` has EAGLE-3
draft trees by confidence instead. Gains are paired: the same seed, the same prompt. What was trained or measured is
kept in `--out`; other settings than `--families`, `--arms` and `--seeds` need another one.

    python benchmarks/draft_weights.py --out runs/draft-weights
    python benchmarks/draft_weights.py --out runs/draft-weights --seeds 0,1,2 --json draft-weights.json
    python benchmarks/draft_weights.py --out runs/draft-weights-trees --shape "tree 20" --families EAGLE-3 \
        --arms "shipped,shipped x 1.5,accepted length,accepted length of siblings"
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import at_temperatures, audited, gain, mean, n_alpha
from draftsmith.benchmarks.common.kept import file_name, same_settings
from draftsmith.benchmarks.common.markdown import cell_text, printed
from draftsmith.benchmarks.common.own_words import answered, prompts_in
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.benchmarks.common.runs import (
    QUIET,
    add_audit,
    add_decoding,
    by_seed,
    cell_file,
    drafters_of,
    kept,
    names_of,
    parser_of,
    settings_of,
    trained,
)
from draftsmith.benchmarks.common.shapes import DEPTH, FAMILIES, SHAPES, Family
from draftsmith.data.prompts import load_prompts
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.requests import first_turns, make_requests
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.storage import json_lines

CHOSEN = {each.name: each for each in FAMILIES if each.name in ("distilled draft", "EAGLE-3", "MTP", "DSpark")}
# the terms that recipes have beside a divergence are left out of every arm but the shipped ones
ALONE: dict[str, Any] = {"objective.kl": 0.0, "objective.ce": 0.0, "objective.tv": 0.0}
LK = ALONE | {"objective.lk_lambda": 1.0, "objective.positions": "geometric"}
LENGTH = ALONE | {"objective.tv": 1.0}
OWN_DRAFTS: dict[str, Any] = {"rollouts.share": 0.5}
ARMS: dict[str, dict[str, Any]] = {
    "shipped": {},
    "shipped x 1.5": {},
    "lk": LK,
    "d-pace": LK | {"objective.positions": "d-pace"},
    "on-policy": LK | {"objective.positions": "on-policy"},
    "accepted length": LENGTH | {"objective.positions": "accepted"},
    "accepted length on-policy": LENGTH | {"objective.positions": "on-policy"},
    "accepted length of siblings": LENGTH | {"objective.positions": "accepted", "objective.siblings": 4},
    "rollouts": OWN_DRAFTS,
    "rollouts and accepted length": LENGTH | OWN_DRAFTS | {"objective.positions": "accepted"},
}
ASKED_FOR = ("accepted length of siblings", "rollouts", "rollouts and accepted length")
"""Arms that are not among the default ones."""
OF_RECIPES: dict[str, dict[str, Any]] = {
    "eagle3-tiny": {"eagle3.ce": 0.0},
    "distill-tiny": {"objective.from_kl_share": 0.0},  # the start has learnt already
}
ROWS_ANEW: dict[str, dict[str, Any]] = {"distill-tiny": {"rollouts.prompt_tokens": 96, "rollouts.new_tokens": 160}}
"""Recipes whose draft writes whole rows, behind the prompts of these; the others draft behind places of rows."""
LONGER = {"shipped x 1.5": 1.5}
"""Of the steps, by arm."""
BASE = "shipped"
WHAT = {
    "shipped": "the recipe's own loss",
    "shipped x 1.5": "the same, 1.5 times the steps",
    "lk": "`lk_lambda` alone, `geometric`",
    "d-pace": "`lk_lambda` alone, `d-pace`",
    "on-policy": "`lk_lambda` alone, `on-policy`",
    "accepted length": "`tv` alone, `accepted`",
    "accepted length on-policy": "`tv` alone, `on-policy`",
    "accepted length of siblings": "`tv` alone, `accepted`, 4 siblings",
    "rollouts": "the recipe's own loss, half of the rows along own drafts",
    "rollouts and accepted length": "`tv` alone, `accepted`, half of the rows along own drafts",
}
FREE = ("families", "arms", "seeds", "json", "repeats")
"""Of the arguments those that may differ from call to call."""
Measured = dict[str, Any]


def main() -> None:
    args = parser().parse_args()
    if lacking := [name for name in args.families if args.shape not in CHOSEN[name].shapes]:
        raise SystemExit(f"{', '.join(lacking)} cannot draft in --shape {args.shape}; name other --families or chain")
    same_settings(args.out, vars(args), free=FREE)
    parts = by_seed(args)
    cells = [(name, arm) for name in args.families for arm in args.arms]
    for part in parts:
        for name, arm in cells:
            measured = kept(cell_file(part, name, arm), partial(measure, CHOSEN[name], arm, part))
            tau = mean([measured["1"]], "tau")
            print(f"{name}, {arm}, seed {part.seed}: tau at T = 1 {cell_text(tau, '.2f')}", flush=True)
    record = assembled({cell: [kept(cell_file(part, *cell), dict) for part in parts] for cell in cells}, args)
    print(printed(record))
    finish(record, args.json)


# ---- training ---------------------------------------------------------------------------------


def train(family: Family, arm: str, args: argparse.Namespace) -> Path:
    """The run of an arm, from the drafter that all arms of a seed begin with."""
    steps = round(args.steps * LONGER.get(arm, 1.0))
    return run_of(
        family,
        file_name(arm),
        {"loop.steps": steps, "model.start_from": start(family, args), **values_of(family, arm)},
        args,
    )


def values_of(family: Family, arm: str) -> dict[str, Any]:
    """What an arm sets in its family's recipe."""
    replaced = "objective.kl" in ARMS[arm]  # an arm that keeps the recipe's loss keeps its own terms too
    values = ARMS[arm] | (OF_RECIPES.get(family.recipe, {}) if replaced else {})
    if "rollouts.share" in values:
        values |= ROWS_ANEW.get(family.recipe, {"rollouts.places": 64})
    return values


def start(family: Family, args: argparse.Namespace) -> Path:
    """The drafter that all arms of a seed are trained on from."""
    return run_of(family, "start", {"loop.steps": args.start_steps}, args) / "drafter"


def run_of(family: Family, name: str, values: dict[str, Any], args: argparse.Namespace) -> Path:
    """A run on the target's own words."""
    rows = {"loop.batch_rows": args.batch_rows, "loop.micro_rows": args.batch_rows}
    own = settings_of(args) | QUIET | {"data.source": own_words(family, args)} | rows | values
    return trained(family.recipe, args.out / "runs" / f"{file_name(family.name)}-{name}", own)


def own_words(family: Family, args: argparse.Namespace) -> Path:
    """What the target writes at temperature 1; one set of rows for all families, arms and seeds."""
    recipe = load_recipe(family.recipe, args.set).recipe
    asked = recipe.data.sequence_length // 4
    return answered(
        prompts_in(args.root, recipe.data, args.answers),
        args.root / "own-words",
        recipe.target.path,
        temperature=1,
        prompt_tokens=asked,
        new_tokens=recipe.data.sequence_length - asked,
    )


# ---- measuring --------------------------------------------------------------------------------


def decoding(args: argparse.Namespace) -> EvalConfig:
    """Which prompts are decoded, and how far."""
    return EvalConfig(
        prompts=args.prompts,
        limit=args.limit,
        max_new_tokens=args.max_new_tokens,
        prompt_tokens=args.prompt_tokens,
        draft_length=DEPTH,
    )


def measure(family: Family, arm: str, args: argparse.Namespace) -> Measured:
    """Sums of every prompt by temperature, and the audit."""
    run = train(family, arm, args)
    target = load_target(load_recipe(family.recipe, args.set).recipe.target.path)
    drafter = family.shapes[args.shape](run / "drafter", target)
    config = decoding(args)
    prompts = load_prompts(config.prompts, limit=config.limit, seed=config.seed)
    requests = make_requests(target, prompts, config)
    decodes = at_temperatures(target, drafter, [each.ids for each in requests], config, draws=args.draws)
    own: Measured = {"run": str(run)}
    if args.seed == args.seeds[0]:  # the others' weights are drafted with by the same code
        report = audited(target, drafter, first_turns(requests), args)
        if report.failures:
            raise SystemExit(f"{family.name}, {arm}: the audit failed")
        own |= {"verdict": report.verdict, "sees": report.rosenblatt.detectable}
    return decodes | own


# ---- the record -------------------------------------------------------------------------------


def assembled(measured: dict[tuple[str, str], list[Measured]], args: argparse.Namespace) -> Record:
    """A row an arm of a family, with what it gains over the shipped loss at either temperature."""
    recipe = load_recipe(CHOSEN[args.families[0]].recipe, args.set).recipe
    heads = {"family": "{family}", "trained on with": "{what}"}
    heads |= {f"tau T={at}": f"{{tau_T{at}}}" for at in (0, 1)}
    heads |= {f"T={at}: less shipped": f"{{gain_T{at}}}" for at in (0, 1)}
    heads |= {"by depth, T=1": "{n_alpha}", "by depth, along text": "{text_alpha}", "audit": "{verdict}"}
    formats = {name: ".2f" for name in ("tau_T0", "tau_T1", "n_alpha", "text_alpha")}
    return record_of(
        args,
        title="Which drafts count in training",
        target=target_weights(recipe.target.path),
        drafters=drafter_weights(drafters_of(measured, args.seeds)),
        setup=f"{args.start_steps} steps of the recipe, shared by all arms of a seed, then {args.steps} of "
        f"{args.batch_rows} rows in the target's own words at temperature 1; {args.limit} held-out prompts of "
        f"{args.prompts}, {args.max_new_tokens} new tokens ({args.draws} draws at T = 1), a {args.shape} of depth "
        f"{DEPTH}.",
        intervals="95 % bootstrap intervals over prompts, the same ones for every seed; gains paired",
        audit={
            "verdict": "of each row, its first seed; the others draft by the same code",
            "sees": f"{max_seen(measured):.3f} of total variation at most",
        },
        formats=formats | {"gain_T0": "+.3f", "gain_T1": "+.3f"},
        rows=[row_of(family, arm, measured, args) for family, arm in measured],
        tables={"draft-weights": table_of(heads)},
    )


def max_seen(measured: dict[tuple[str, str], list[Measured]]) -> float:
    """The smallest total variation that every audit would have seen."""
    return max(of_seeds[0]["sees"] for of_seeds in measured.values())


def row_of(
    family: str, arm: str, measured: dict[tuple[str, str], list[Measured]], args: argparse.Namespace
) -> dict[str, Any]:
    """An arm's figures over the seeds."""
    own = measured[family, arm]
    base = measured.get((family, BASE)) if arm != BASE else None
    row: dict[str, Any] = {"family": family, "arm": arm, "what": WHAT[arm]}
    for at in ("0", "1"):
        sums = [each[at] for each in own]
        row[f"tau_T{at}"] = mean(sums, "tau")
        row[f"gain_T{at}"] = None if base is None else gain(sums, [each[at] for each in base], "tau")
    return row | {
        "n_alpha": n_alpha([each["1"] for each in own]),
        "text_alpha": [sum(depth) / len(own) for depth in zip(*(along_text(Path(each["run"])) for each in own))],
        "verdict": own[0]["verdict"],
    }


def along_text(run: Path) -> list[float]:
    """sum min(p, q) by depth on held-out rows, every draft with the text in front of it, at the end of training."""
    last = [line for line in json_lines(run / "metrics.jsonl") if line["kind"] == "validation"][-1]
    names = ("validation_alpha", *(f"validation_alpha_{depth}" for depth in range(2, DEPTH + 1)))
    return [last[name] for name in names if name in last]


def parser() -> argparse.ArgumentParser:
    """Also of `weight_speeds.py`."""
    parser = parser_of(__doc__, out="runs/draft-weights")
    parser.add_argument("--families", type=names_of(CHOSEN), default=list(CHOSEN))
    parser.add_argument("--arms", type=names_of(ARMS), default=[arm for arm in ARMS if arm not in ASKED_FOR])
    parser.add_argument("--start-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--answers", type=int, default=1200, help="rows that the target writes")
    parser.add_argument("--shape", default="chain", choices=SHAPES, help="in which a family drafts")
    parser.add_argument("--draws", type=int, default=2, help="decodes of a prompt at T = 1")
    add_decoding(parser, limit=32)
    add_audit(parser, tokens=1_000, sequences=20_000)
    return parser


if __name__ == "__main__":
    main()
