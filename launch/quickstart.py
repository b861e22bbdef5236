"""From nothing to trained, proven and reported drafters: the main job, offline, on a CPU.

The embedded target and three kinds of drafters for it (a distilled draft, Medusa's heads, EAGLE-3), prompt
lookup, which needs no training, and the untrained draft as the control: audit, evaluation, report.
Read next: `train.py`, `measure/run.py`.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TrainingFailed
from .recipe.load import load_recipe
from .recipe.model import Recipe
from .train import train

if TYPE_CHECKING:
    from rich.console import Console

    from ..eval.measure.arms import Arm
    from ..eval.measure.requests import Request
    from .measure.run import Loaded

# recipe, the folder of its run, and how long it learns here: the whole takes minutes, not hours
RUNS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("distill-tiny", "run", {"loop.steps": "125", "loop.validate_every": "125"}),
    ("medusa-tiny", "medusa", {"loop.steps": "150", "loop.validate_every": "150"}),
    ("eagle3-tiny", "eagle3", {"loop.steps": "150", "loop.validate_every": "150"}),
)
UNTRAINED = "prompt-lookup"
"""The method beside them that needs no training."""


def quickstart(out: Path, console: Console) -> None:
    """Run everything into `out`, print the table, the report's path and the next command."""
    start = time.perf_counter()
    for number, (recipe, folder, values) in enumerate(RUNS, 1):
        resolved = load_recipe(recipe, [("probe.every_steps", ""), *values.items()])
        console.print(f"1/4 training, {number} of {len(RUNS)}: {resolved.recipe.summary} ...")
        train(resolved, out=out / folder)
    console.print("2/4 auditing: is the output the target's own? ...")
    results = _measure(out, console)
    console.print("4/4 reporting ...")
    from ..eval.report.report import write_report
    from ..eval.report.tables import show

    run = out / "run"
    show(results, console)
    page = write_report(run)
    console.print(f"done in {time.perf_counter() - start:.0f} s; report: {page}")
    console.print(f"next: draftsmith audit {run} --plant fresh-draw   (an audit that must fail)")
    console.print("      draftsmith copy distill-tiny my.yaml        (then train your own)")


def _measure(out: Path, console: Console) -> dict[str, Any]:
    """Audit and measure what was trained; measure the untrained draft beside it."""
    from ..eval.measure.evaluate import evaluate
    from ..eval.measure.requests import first_turns, make_requests
    from .measure.run import arms_of, audited, left_out, prompts_of, write_json

    pair = _load(out)
    config, folder = pair.recipe.eval, pair.folder / "eval"
    prompts = prompts_of(config)
    requests = make_requests(pair.target, prompts, config)
    arms = list(audited(pair, arms_of(pair), first_turns(requests), folder, console).values())
    console.print("3/4 measuring acceptance and speed ...")
    results = evaluate(pair.target, arms, requests, config, left_out=left_out(prompts, requests))
    results["draft"]["settings"] = pair.recipe.drafter.model_dump(mode="json")
    results["repeat"] = [shlex.join(["draftsmith", "quickstart", "--out", str(out)])]
    results["rows"].append(_untrained(pair, requests, arms[0]))
    write_json(folder / "results.json", results)
    unproven = [arm.name for arm in arms if arm.verdict != "lossless"]
    if unproven:
        raise TrainingFailed(f"the audit failed for {', '.join(unproven)}, so no number above can be trusted")
    return results


def _load(out: Path) -> Loaded:
    """All drafters on one target, and prompt lookup; the first run says how they are measured."""
    from ..drafters.registry import load_drafter
    from .check.early import named
    from .measure.methods import make_method
    from .measure.run import load_pair
    from .requests import Pair

    first, *others = [folder for _, folder, _ in RUNS]
    # four audits and a sweep: with less evidence for each, the whole stays a matter of minutes
    less = {
        "audit.tokens": "4000",
        "audit.sequences": "150000",
        "audit.prompts": "8",
        "eval.sweep": "[1, 2, 4]",
        "eval.repeats": "1",
    }
    pair = load_pair(named(Pair(out / first), list(less.items())))
    length = pair.recipe.eval.draft_length
    paths = {name: out / name / "drafter" for name in others}
    drafters = {name: load_drafter(path, pair.target, draft_length=length) for name, path in paths.items()}
    drafters[UNTRAINED] = make_method(UNTRAINED, pair.recipe, pair.target, lambda: pair.drafter)
    return replace(pair, drafters={**pair.drafters, **drafters}, paths={**pair.paths, **paths})


def _untrained(pair: Loaded, requests: list[Request], trained: Arm) -> dict[str, Any]:
    """The draft model before its first step, as the control.

    It is not audited: its row says that the verdict is the trained draft's, whose code and rule it shares.
    """
    import torch

    from ..decoding.target.backbone import Backbone
    from ..drafters.model.draft_model import DraftModel
    from ..eval.measure.arms import Arm
    from ..eval.measure.evaluate import evaluate
    from ..trainers.student.draft import draft_model

    recipe: Recipe = pair.recipe
    torch.manual_seed(recipe.loop.seed)
    fresh = draft_model(recipe.model, pair.target.model, pair.target.tokenizer)
    drafter = DraftModel(Backbone(fresh.eval(), name="untrained"), pair.target.vocabulary)
    config = recipe.eval.model_copy(update={"temperatures": [0.0], "sweep": [], "repeats": 1})
    arm = Arm("untrained draft", drafter, trained.verdict, audited_as=trained.audited)
    row: dict[str, Any] = evaluate(pair.target, [arm], requests, config)["rows"][0]
    return row
