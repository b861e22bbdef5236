"""A drafter frozen and one that follows, while their target is tuned away from them in stages: tau against distance.

A chat target is the embedded one, trained on with chats for `--first` steps; a drafter learns its answers at
temperature 1, once a training seed. Then the target is trained on, stage by stage (`--stages`, steps each). At every
stage it answers the same questions anew, `draftsmith adapt` makes a round of them (the new drafter is in use only
where its tau is higher beyond chance and its audit passes), and two drafters draft for held-out questions: the frozen
one and the one in use. How far the target has moved is its KL from the first one on that one's held-out answers. What
was done is kept in `--out`.

    python benchmarks/moving_target.py --out runs/moving
    python benchmarks/moving_target.py --out runs/moving --seeds 0,1,2 --json moving-target.json
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import Sums, at_temperatures, gain, mean
from draftsmith.benchmarks.common.chats import HELD_OUT, add_target_settings, chat_target, questions_in
from draftsmith.benchmarks.common.kept import same_settings
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.own_words import answered
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Figure, Record, figure, table_of
from draftsmith.benchmarks.common.runs import (
    QUIET,
    add_audit,
    add_decoding,
    by_seed,
    kept,
    numbers,
    parser_of,
    settings_of,
    trained,
)
from draftsmith.benchmarks.common.shapes import DEPTH
from draftsmith.data.prompts import load_prompts
from draftsmith.data.rows.prepare import prepare
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.drift import measure_drift
from draftsmith.eval.measure.requests import make_requests
from draftsmith.launch.cli import main as draftsmith
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.storage import write_text

RECIPE = "eagle-tiny"
DRAFTERS = ("frozen", "adapted")
TEMPERATURES = ("0", "1")


@dataclass(frozen=True)
class Stage:
    """A target, and what it answered."""

    number: int
    target: Path
    answers: Path


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("seeds", "json"))
    stages = list(moved(args))
    distances = kept(args.out / "distances.json", partial(far, stages, args))
    measured = []
    for part in by_seed(args):
        first = drafter_of(stages[0], part)
        own = [follow(stage, first, part) for stage in stages]
        measured.append([kept(part.out / f"stage-{each['stage']}.json", partial(measure, each, part)) for each in own])
    record = assembled(stages, distances, measured, args)
    print(printed(record))
    finish(record, args.json)


# ---- the target -------------------------------------------------------------------------------


def moved(args: argparse.Namespace) -> Iterator[Stage]:
    """The target at every stage, each trained on from the one before it; the first is what the drafter is for."""
    start: Any = "tiny"
    for number, steps in enumerate([args.first, *args.stages]):
        run = args.out / "targets" / f"stage-{number}"
        start = chat_target(run, steps, dict(args.target_set), start=start, schedule="constant")
        yield Stage(number, start, answers_of(number, start, args))


def answers_of(number: int, target: Path, args: argparse.Namespace) -> Path:
    """What it answers to the training questions at temperature 1."""
    questions = questions_in(args.out, args.questions)
    folder = args.out / "answers" / f"stage-{number}"
    return answered(
        questions, folder, str(target), temperature=1, prompt_tokens=args.prompt_tokens, new_tokens=args.answer_tokens
    )


def far(stages: Sequence[Stage], args: argparse.Namespace) -> list[Any]:
    """KL(first || stage's) on held-out answers of the first target, with its interval, by stage."""
    first = load_target(str(stages[0].target))
    values = {"target.path": stages[0].target, "data.source": stages[0].answers} | dict(args.set)
    recipe = load_recipe(RECIPE, [(key, str(value)) for key, value in values.items()]).recipe
    rows = prepare(recipe.data, first.tokenizer, out=None).validation
    drifts = (measure_drift(first, load_target(str(each.target)), rows, count=args.limit) for each in stages)
    return [each.kl.to_list() for each in drifts]


# ---- its drafters -----------------------------------------------------------------------------


def drafter_of(stage: Stage, args: argparse.Namespace) -> Path:
    """A run from scratch on a stage's own answers."""
    own = {"target.path": stage.target, "data.source": stage.answers, "loop.steps": args.start_steps}
    return trained(RECIPE, args.out / "runs" / f"stage-{stage.number}", settings_of(args) | QUIET | own)


def follow(stage: Stage, first: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A round of `draftsmith adapt` for a stage's target, and where its drafters lie."""
    place = {"stage": stage.number, "target": stage.target, "round": None, "frozen": first / "drafter"}
    if not stage.number:
        return {**place, "adapted": first / "drafter"}
    out, in_use = args.out / "adapted", args.out / f"in-use-{stage.number}"
    if len(rounds_of(out)) < stage.number:
        write_text(args.out / "rollouts" / f"{stage.number}.jsonl", stage.answers.read_text(encoding="utf-8"))
        words: list[Any] = ["adapt", first, "--target", stage.target, "--rollouts", args.out / "rollouts"]
        words += ["--out", out, "--rows", 1, "--steps", args.adapt_steps, "--temperature", 1]
        words += ["--optimizer.lr", args.lr]
        words += ["--audit.tokens", args.audit_tokens, "--audit.sequences", args.audit_sequences]
        code = draftsmith([str(word) for word in words])
        if code:
            raise SystemExit(code)
    if not in_use.is_dir():  # the next round may replace it
        shutil.copytree(out / "drafter", in_use)
    return {**place, "round": rounds_of(out)[stage.number - 1], "adapted": in_use}


def rounds_of(adapted: Path) -> list[dict[str, Any]]:
    """What an adapted run says of its rounds."""
    state = adapted / "adapted.json"
    rounds: list[dict[str, Any]] = json.loads(state.read_text(encoding="utf-8"))["rounds"] if state.is_file() else []
    return rounds


# ---- measuring --------------------------------------------------------------------------------


def measure(own: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Sums of every held-out question by drafter and temperature, and what the round said."""
    target = load_target(str(own["target"]))
    config = EvalConfig(
        prompts=HELD_OUT, limit=args.limit, max_new_tokens=args.max_new_tokens, prompt_tokens=args.prompt_tokens
    )
    requests = make_requests(target, load_prompts(config.prompts, limit=config.limit, seed=config.seed), config)
    ids = [each.ids for each in requests]
    sums = {
        name: at_temperatures(
            target, load_drafter(own[name], target, draft_length=DEPTH), ids, config, draws=args.draws
        )
        for name in DRAFTERS
    }
    made = own["round"] or {}
    return {**sums, "taken": made.get("taken"), "verdict": made.get("verdict"), "seconds": made.get("seconds")}


# ---- the record -------------------------------------------------------------------------------


def assembled(
    stages: Sequence[Stage], distances: Sequence[Any], measured: Sequence[Sequence[Any]], args: argparse.Namespace
) -> Record:
    """A row a stage."""
    steps = [args.first, *args.stages]
    rows = [
        row_of(number, sum(steps[1 : number + 1]), figure(distances[number]), [each[number] for each in measured])
        for number in range(len(stages))
    ]
    heads = {"steps of tuning": "{steps}", "KL from the first target": "{kl}"}
    heads |= {f"tau T={at}: {name}": f"{{{name}_T{at}}}" for at in TEMPERATURES for name in DRAFTERS}
    heads |= {"T=1: adapted less frozen": "{gain_T1}", "new one taken": "{taken}", "audits of rounds": "{verdict}"}
    formats = {f"{name}_T{at}": ".2f" for at in TEMPERATURES for name in DRAFTERS}
    folders = {
        f"{name}, seed {part.seed}": part.out / folder
        for part in by_seed(args)
        for name, folder in (("frozen", "runs/stage-0/drafter"), ("adapted", "adapted/drafter"))
    }
    return record_of(
        args,
        title="A drafter for a target that moves",
        target=target_weights(str(stages[0].target)),
        drafters=drafter_weights(folders),
        setup=f"The embedded target after {args.first} steps on chats, trained on with the same chats at a constant "
        f"rate; {RECIPE} for {args.start_steps} steps on its answers; rounds of {args.adapt_steps} steps at a "
        f"rate of {args.lr:g}; {args.limit} held-out questions, {args.max_new_tokens} new tokens ({args.draws} draws "
        f"at T = 1), a chain of {DEPTH}.",
        intervals="95 % bootstrap intervals over questions, the same ones for every seed; gains paired",
        audit={"verdict": "of each round's new drafter", "sees": f"{args.audit_tokens:,} tokens"},
        formats=formats | {"kl": ".3f", "gain_T1": "+.3f", "steps": ".0f"},
        rows=rows,
        tables={"moving-target": table_of(heads)},
    )


def row_of(number: int, steps: int, kl: Figure | None, of_seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A stage's figures over the seeds."""

    def sums(name: str, at: str) -> list[Sums]:
        return [each[name][at] for each in of_seeds]

    row: dict[str, Any] = {"steps": steps, "kl": kl}
    row |= {f"{name}_T{at}": mean(sums(name, at), "tau") for at in TEMPERATURES for name in DRAFTERS}
    if not number:
        return row | {"gain_T1": None, "taken": "-", "verdict": "-"}
    taken = sum(bool(each["taken"]) for each in of_seeds)
    verdicts = ", ".join(sorted({each["verdict"] for each in of_seeds}))
    paired = gain(sums("adapted", "1"), sums("frozen", "1"), "tau")
    return row | {"gain_T1": paired, "taken": f"{taken} of {len(of_seeds)}", "verdict": verdicts}


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, out="runs/moving")
    parser.add_argument("--first", type=int, default=60, help="steps on chats before a drafter is trained")
    parser.add_argument("--stages", type=numbers, default=[10, 20, 40, 80], help="further steps, stage by stage")
    parser.add_argument("--start-steps", type=int, default=300)
    parser.add_argument("--adapt-steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3, help="of the rounds")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--draws", type=int, default=2, help="decodes of a question at T = 1")
    add_target_settings(parser)
    add_decoding(parser, limit=32)
    add_audit(parser, tokens=2_000, sequences=50_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
