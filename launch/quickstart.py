"""From nothing to a trained, proven and reported drafter: the main job, offline, on a CPU.

The embedded target, the recipe `distill-tiny`, the untrained draft as the control, audit,
evaluation, report. Read next: `train.py`, `measure.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import TrainingFailed
from .recipe import Resolved, load_recipe
from .train import train

if TYPE_CHECKING:
    from rich.console import Console

    from ..data.prompts import Prompt
    from .measure import Loaded


def quickstart(out: Path, console: Console) -> None:
    """Run everything into `out`, print the table, the report's path and the next command."""
    start = time.perf_counter()
    resolved = load_recipe("distill-tiny")
    run = out / "run"
    console.print("1/4 distilling a draft from the embedded target (about 3 minutes) ...")
    train(resolved, out=run)
    console.print("2/4 auditing: is the output the target's own? ...")
    results = _measure(run, resolved, console)
    console.print("4/4 reporting ...")
    from ..eval.report import write_report
    from ..eval.tables import show

    show(results, console)
    page = write_report(run)
    console.print(f"done in {time.perf_counter() - start:.0f} s; report: {page}")
    console.print(f"next: draftsmith audit {run} --plant fresh-draw   (an audit that must fail)")
    console.print("      draftsmith copy distill-tiny my.yaml        (then train your own)")


def _measure(run: Path, resolved: Resolved, console: Console) -> dict:
    """Audit and measure the trained draft; measure the untrained one beside it."""
    from ..eval.evaluate import Arm, evaluate
    from .cli import Pair
    from .measure import audit_pair, load_pair, prompts_of, write_json

    pair = load_pair(Pair(run), ())
    prompts = prompts_of(pair, None)
    report = audit_pair(pair, prompts, run / "eval", console)
    console.print("3/4 measuring acceptance and speed ...")
    arm = Arm("draft model", pair.drafter, report.verdict)
    results = evaluate(pair.target, [arm], prompts, resolved.recipe.eval)
    results["rows"].append(_untrained(pair, prompts, resolved, report.verdict))
    write_json(run / "eval" / "results.json", results)
    if report.failures:
        raise TrainingFailed("the audit failed, so no number above can be trusted")
    return results


def _untrained(pair: Loaded, prompts: list[Prompt], resolved: Resolved, verdict: str) -> dict:
    """The same draft before its first step, as the control."""
    import torch

    from ..decoding.backbone import Backbone
    from ..drafters.draft_model import DraftModel
    from ..eval.evaluate import Arm, evaluate
    from ..trainers.distill import draft_model

    torch.manual_seed(resolved.recipe.loop.seed)
    fresh = draft_model(resolved.recipe.model, pair.target.model, pair.target.tokenizer)
    drafter = DraftModel(Backbone(fresh.eval(), name="untrained"), pair.target.vocabulary)
    config = resolved.recipe.eval.model_copy(
        update={"temperatures": [0.0], "sweep": [], "repeats": 1}
    )
    arm = Arm("untrained draft", drafter, verdict)
    row: dict = evaluate(pair.target, [arm], prompts, config)["rows"][0]
    return row
