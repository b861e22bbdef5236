"""`eval` and `audit`: from a run folder, or a target and a drafter, to results on disk.

Read next: `eval/evaluate.py`, `eval/audit.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.prompts import Prompt, load_prompts, render
from ..decoding.backbone import Backbone
from ..decoding.loading import load_target
from ..drafters.draft_model import DraftModel
from ..drafters.registry import load_drafter
from ..errors import RequestError
from ..eval.audit import AuditReport, audit
from ..eval.evaluate import NOT_AUDITED, evaluate
from ..eval.tables import show
from ..storage import write_text
from .recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from .cli import Audit, Eval, Pair


@dataclass(frozen=True)
class Loaded:
    """A pair ready to decode, the recipe that says how, and where results go."""

    recipe: Recipe
    target: Backbone
    drafter: DraftModel
    folder: Path


def load_pair(pair: Pair, overrides: Sequence[tuple[str, str]]) -> Loaded:
    """The pair of a run folder, or the one that --target and --drafter name."""
    if pair.run_folder is not None:
        saved = pair.run_folder / "run.yaml"
        if not saved.is_file():
            raise RequestError(
                f"{pair.run_folder} is no run folder: run.yaml is missing; name the --out of a "
                "training run, or use --target and --drafter"
            )
        recipe = load_recipe(str(saved), overrides).recipe
        folder = pair.run_folder
        target_path, drafter_path = pair.target or recipe.target.path, folder / "drafter"
    elif pair.target is not None and pair.drafter is not None:
        recipe = load_recipe("distill-tiny", overrides).recipe
        folder, target_path, drafter_path = Path(), pair.target, Path(pair.drafter)
    else:
        raise RequestError("nothing to measure: name a run folder, or --target and --drafter")
    target = load_target(
        target_path, revision=recipe.target.revision, dtype=recipe.target.dtype,
        trust_remote_code=recipe.target.trust_remote_code,
    )  # fmt: skip
    drafter = load_drafter(
        drafter_path, target, draft_length=recipe.eval.draft_length,
        policy=recipe.drafter.policy,
    )  # fmt: skip
    return Loaded(recipe, target, drafter, folder)


def run_eval(request: Eval, overrides: Sequence[tuple[str, str]], console: Console) -> None:
    """Audit, measure, print, and write `results.json` and `audit.json`."""
    pair = load_pair(request, overrides)
    out = request.out or pair.folder / "eval"
    prompts = prompts_of(pair, request.prompts)
    verdict = NOT_AUDITED
    if request.audit:
        verdict = audit_pair(pair, prompts, out, console).verdict
    config = pair.recipe.eval
    if request.prompts is not None:
        config = config.model_copy(update={"prompts": request.prompts})
    results = evaluate(
        pair.target, pair.drafter, prompts, config, name="draft model", verdict=verdict
    )
    write_json(out / "results.json", results)
    show(results, console)
    console.print(f"results: {out / 'results.json'}")


def run_audit(request: Audit, overrides: Sequence[tuple[str, str]], console: Console) -> bool:
    """Run the audit alone; whether it passed."""
    pair = load_pair(request, overrides)
    prompts = prompts_of(pair, request.prompts)
    out = request.out or pair.folder / "eval"
    report = audit_pair(pair, prompts, out, console, plant=request.plant, decoder=request.decoder)
    return not report.failures


def audit_pair(
    pair: Loaded, prompts: Sequence[Prompt], out: Path, console: Console, **how: Any
) -> AuditReport:
    """Audit the pair on the prompts' first turns and write `audit.json`."""
    ids = [
        render(prompt, pair.target.tokenizer, limit=pair.recipe.eval.prompt_tokens)
        for prompt in prompts
    ]
    report = audit(pair.target, pair.drafter, ids, pair.recipe.audit, **how)
    console.print(report.text())
    name = "audit.json" if how.get("plant") is None else f"audit-planted-{how['plant']}.json"
    write_json(out / name, report.to_dict())
    return report


def prompts_of(pair: Loaded, source: str | None) -> list[Prompt]:
    """The prompts of a measurement: those of `source`, or the recipe's."""
    config = pair.recipe.eval
    return load_prompts(source or config.prompts, limit=config.limit, seed=config.seed)


def write_json(path: Path, content: Any) -> None:
    """Write a result so that people can read it too."""
    write_text(path, json.dumps(content, indent=1) + "\n")
