"""Going on from a drafter on another kind of text: what it gains there, what it forgets, and what averaging adds.

A chat target is the embedded one, trained on with chats for `--target-steps` steps: it writes code and answers. A
drafter of each family learns the code that it writes at temperature 1, once a training seed; from there every arm
trains for `--steps` more: on the target's answers to questions, on both kinds of rows, at a quarter of the rate, with
the weights averaged (`loop.ema`), or from scratch. Each drafts chains for held-out code and held-out questions, at T =
0 and 1, and is audited with its first seed. Gains are paired: the same seed, the same prompt. What was trained or
measured is kept in `--out`; other settings than `--families`, `--arms` and `--seeds` need another one.

    python benchmarks/warm_starts.py --out runs/warm-starts
    python benchmarks/warm_starts.py --out runs/warm-starts --seeds 0,1,2 --json warm-starts.json
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import at_temperatures, audited, gain, mean
from draftsmith.benchmarks.common.chats import HELD_OUT, add_target_settings, chat_target, questions_in
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
from draftsmith.benchmarks.common.shapes import DEPTH, FAMILIES, Family
from draftsmith.data.prompts import load_prompts
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.requests import first_turns, make_requests
from draftsmith.launch.recipe.load import load_recipe

CHOSEN = {each.name: each for each in FAMILIES if each.name in ("distilled draft", "EAGLE-1")}
SETS = {"code": "stdlib", "questions": HELD_OUT}
"""Held-out prompts of either kind of text; the drafter knows the first."""
BASE = "before"
ARMS = {
    BASE: "nothing more",
    "new rows": "answers",
    "smaller rate": "answers, a quarter of the rate",
    "both": "answers and code, half of the rows each",
    "averaged": "answers, `loop.ema` .98",
    "scratch": "answers alone, from scratch",
}
OF_RECIPES: dict[str, dict[str, Any]] = {"distill-tiny": {"objective.from_kl_share": 0.0}}
"""Of those that go on: the start has learnt already."""
Measured = dict[str, Any]


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("families", "arms", "seeds", "json"))
    parts = by_seed(args)
    cells = [(name, arm) for name in args.families for arm in args.arms]
    for part in parts:
        for name, arm in cells:
            measured = kept(cell_file(part, name, arm), partial(measure, CHOSEN[name], arm, part))
            taus = (f"{kind} {cell_text(mean([measured[kind]['1']], 'tau'), '.2f')}" for kind in SETS)
            print(f"{name}, {arm}, seed {part.seed}: tau at T = 1 {', '.join(taus)}", flush=True)
    record = assembled({cell: [kept(cell_file(part, *cell), dict) for part in parts] for cell in cells}, args)
    print(printed(record))
    finish(record, args.json)


# ---- the target and its words -----------------------------------------------------------------


def target_of(args: argparse.Namespace) -> Path:
    """The target of all arms and seeds."""
    return chat_target(args.root / "target", args.target_steps, dict(args.target_set))


def rows_of(kinds: Sequence[str], args: argparse.Namespace) -> Path:
    """What the target writes at temperature 1: code, answers, or a folder of both with as many rows of each."""
    if len(kinds) > 1:
        folder = args.root / "rows-of-both"
        folder.mkdir(exist_ok=True)
        for kind in kinds:
            shutil.copy(rows_of([kind], args), folder / f"{kind}.jsonl")
        return folder
    recipe = load_recipe(CHOSEN[args.families[0]].recipe, args.set).recipe
    asked = recipe.data.sequence_length // 4
    prompts = (
        prompts_in(args.root, recipe.data, args.rows) if kinds == ["code"] else questions_in(args.root, args.rows)
    )
    return answered(
        prompts,
        args.root / f"words-{kinds[0]}",
        str(target_of(args)),
        temperature=1,
        prompt_tokens=asked if kinds == ["code"] else args.prompt_tokens,
        new_tokens=recipe.data.sequence_length - asked,
    )


# ---- training ---------------------------------------------------------------------------------


def train(family: Family, arm: str, args: argparse.Namespace) -> Path:
    """The run of an arm; all but the one from scratch go on from the drafter of the code."""
    known: dict[str, Any] = {"data.source": rows_of(["code"], args), "loop.steps": args.start_steps}
    start = run_of(family, BASE, known, args)
    if arm == BASE:
        return start
    rate = load_recipe(family.recipe, args.set).recipe.optimizer.lr
    kinds = [*SETS] if arm == "both" else ["questions"]
    values: dict[str, Any] = {"data.source": rows_of(kinds, args), "loop.steps": args.steps}
    if arm != "scratch":
        values |= {"model.start_from": start / "drafter", **OF_RECIPES.get(family.recipe, {})}
    values |= {"smaller rate": {"optimizer.lr": rate / 4}, "averaged": {"loop.ema": 0.98}}.get(arm, {})
    return run_of(family, arm, values, args)


def run_of(family: Family, arm: str, values: dict[str, Any], args: argparse.Namespace) -> Path:
    """A run on what the chat target wrote."""
    rows = {"loop.batch_rows": args.batch_rows, "loop.micro_rows": args.batch_rows, "target.path": target_of(args)}
    own = settings_of(args) | QUIET | rows | values
    return trained(family.recipe, args.out / "runs" / f"{file_name(family.name)}-{file_name(arm)}", own)


# ---- measuring --------------------------------------------------------------------------------


def measure(family: Family, arm: str, args: argparse.Namespace) -> Measured:
    """Sums of every prompt by kind of text and temperature, and the audit."""
    run = train(family, arm, args)
    target = load_target(str(target_of(args)))
    drafter = family.shapes["chain"](run / "drafter", target)
    own: Measured = {"run": str(run)}
    for kind, source in SETS.items():
        config = EvalConfig(
            prompts=source, limit=args.limit, max_new_tokens=args.max_new_tokens, prompt_tokens=args.prompt_tokens
        )
        requests = make_requests(target, load_prompts(source, limit=config.limit, seed=config.seed), config)
        own[kind] = at_temperatures(target, drafter, [each.ids for each in requests], config, draws=args.draws)
    if args.seed == args.seeds[0]:  # the others' weights are drafted with by the same code
        report = audited(target, drafter, first_turns(requests), args)
        if report.failures:
            raise SystemExit(f"{family.name}, {arm}: the audit failed")
        own |= {"verdict": report.verdict, "sees": report.rosenblatt.detectable}
    return own


# ---- the record -------------------------------------------------------------------------------


def assembled(measured: dict[tuple[str, str], list[Measured]], args: argparse.Namespace) -> Record:
    """A row an arm of a family, with what it gains on either kind of text over the drafter that it began with."""
    heads = {"family": "{family}", "trained on with": "{what}"}
    heads |= {f"{kind}: tau T={at}": f"{{{kind}_T{at}}}" for kind in SETS for at in "01"}
    heads |= {f"{kind}, T=1: less before": f"{{{kind}_gain}}" for kind in SETS} | {"audit": "{verdict}"}
    formats = {f"{kind}_T{at}": ".2f" for kind in SETS for at in "01"} | {f"{kind}_gain": "+.2f" for kind in SETS}
    sees = max(of_seeds[0]["sees"] for of_seeds in measured.values())
    return record_of(
        args,
        title="Going on from a drafter on other text",
        target=target_weights(str(target_of(by_seed(args)[0]))),
        drafters=drafter_weights(drafters_of(measured, args.seeds)),
        setup=f"The embedded target after {args.target_steps} steps on chats. {args.start_steps} steps of the recipe "
        f"on the code that it writes, then {args.steps} of {args.batch_rows} rows; {args.rows} rows of either kind, "
        f"at temperature 1; {args.limit} held-out prompts of either, {args.max_new_tokens} new tokens ({args.draws} "
        f"draws at T = 1), a chain of {DEPTH}.",
        intervals="95 % bootstrap intervals over prompts, the same ones for every seed; gains paired",
        audit={
            "verdict": "of each row, its first seed; the others draft by the same code",
            "sees": f"{sees:.3f} of total variation at most",
        },
        formats=formats,
        rows=[row_of(family, arm, measured) for family, arm in measured],
        tables={"warm-starts": table_of(heads)},
    )


def row_of(family: str, arm: str, measured: dict[tuple[str, str], list[Measured]]) -> dict[str, Any]:
    """An arm's figures over the seeds."""
    own, base = measured[family, arm], measured.get((family, BASE)) if arm != BASE else None
    row: dict[str, Any] = {"family": family, "arm": arm, "what": ARMS[arm], "verdict": own[0]["verdict"]}
    for kind in SETS:
        row |= {f"{kind}_T{at}": mean([each[kind][at] for each in own], "tau") for at in "01"}
        before = None if base is None else [each[kind]["1"] for each in base]
        row[f"{kind}_gain"] = None if before is None else gain([each[kind]["1"] for each in own], before, "tau")
    return row


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, out="runs/warm-starts")
    parser.add_argument("--families", type=names_of(CHOSEN), default=list(CHOSEN))
    parser.add_argument("--arms", type=names_of(ARMS), default=list(ARMS))
    parser.add_argument("--target-steps", type=int, default=60, help="on chats, before a drafter is trained")
    parser.add_argument("--start-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--rows", type=int, default=500, help="that the target writes, of either kind")
    parser.add_argument("--draws", type=int, default=2, help="decodes of a prompt at T = 1")
    add_target_settings(parser)
    add_decoding(parser, limit=32)
    add_audit(parser, tokens=1_000, sequences=20_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
