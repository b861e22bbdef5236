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
from ..decoding.proposal import Proposer
from ..drafters.draft_model import DraftModel
from ..drafters.registry import load_drafter
from ..errors import DraftsmithError, RequestError
from ..eval.audit import AuditReport, audit
from ..eval.evaluate import Arm, evaluate
from ..eval.tables import show
from ..storage import write_text
from .methods import NEED_DRAFT, SKELETON, make_method, split_methods
from .recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from .cli import Audit, Eval, Pair


@dataclass(frozen=True)
class Loaded:
    """A target and its drafters ready to decode, the recipe that says how, where results go."""

    recipe: Recipe
    target: Backbone
    drafters: dict[str, Proposer]
    """By the name of the method, in the order asked for."""
    folder: Path

    @property
    def drafter(self) -> Proposer:
        """The first one."""
        return next(iter(self.drafters.values()))


def load_pair(pair: Pair, overrides: Sequence[tuple[str, str]]) -> Loaded:
    """The target and drafter of a run folder, or those that --target and --drafter name."""
    names = split_methods(pair.method)
    drafter_path: Path | None = None if pair.drafter is None else Path(pair.drafter)
    if pair.run_folder is not None:
        saved = pair.run_folder / "run.yaml"
        if not saved.is_file():
            raise RequestError(
                f"{pair.run_folder} is no run folder: run.yaml is missing; name the --out of a "
                "training run, or use --target and --drafter"
            )
        recipe = load_recipe(str(saved), overrides).recipe
        folder = pair.run_folder
        target_path = pair.target or tuned_target(folder, recipe) or recipe.target.path
        drafter_path = drafter_path or folder / "drafter"
    elif pair.target is not None:
        recipe = load_recipe("distill-tiny", overrides).recipe
        folder, target_path = Path(), pair.target
    else:
        raise RequestError(
            "nothing to measure: name a run folder, or --target and --drafter, or --target and a "
            "--method that needs no drafter"
        )
    if drafter_path is None and set(names) & set(NEED_DRAFT):
        raise RequestError(
            f"--method {pair.method} needs a drafter: name its folder by --drafter, or a run"
        )
    target = load_target(
        target_path, revision=recipe.target.revision, dtype=recipe.target.dtype,
        trust_remote_code=recipe.target.trust_remote_code,
    )  # fmt: skip

    def trained() -> Proposer:
        return load_drafter(
            drafter_path or "", target, draft_length=recipe.eval.draft_length,
            config=recipe.drafter,
        )  # fmt: skip

    drafters = {
        name: make_method(name, recipe, target, trained) for name in names if name != SKELETON
    }
    return Loaded(recipe, target, drafters, folder)


def tuned_target(folder: Path, recipe: Recipe) -> str | None:
    """The target that a run has changed and its drafter fits; None where it was frozen."""
    place = folder / "target"
    return str(place) if recipe.method != "target" and place.is_dir() else None


def say_tuned(pair: Loaded, console: Console) -> Recipe | None:
    """The recipe of the run that has changed the target that decodes; said, as no verdict tells it.

    None where nobody has. A target named by hand is known by the run folder that it lies in.
    """
    folder = Path(pair.target.name).parent
    saved = folder / "run.yaml"
    if not saved.is_file():
        return None
    recipe = pair.recipe if folder == pair.folder else load_recipe(str(saved)).recipe
    tuned = tuned_target(folder, recipe)
    if tuned is None or Path(tuned) != Path(pair.target.name):
        return None
    console.print(
        f"the run has tuned its target: {pair.target.name} decodes, and the audit compares with it",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    return recipe


def drift_of(pair: Loaded, console: Console) -> dict[str, Any] | None:
    """How far a run has moved its target from the original, on the run's held-out rows.

    None where no run has.
    """
    recipe = say_tuned(pair, console)
    if recipe is None:
        return None
    from ..data.prepare import prepare
    from ..eval.drift import measure_drift

    config = recipe.target
    original = load_target(
        config.path, revision=config.revision, dtype=config.dtype,
        device=str(pair.target.device), trust_remote_code=config.trust_remote_code,
    )  # fmt: skip
    rows = prepare(recipe.data, pair.target.tokenizer, out=None).validation
    loop = recipe.loop
    found = measure_drift(original, pair.target, rows, count=loop.validate_rows, seed=loop.seed)
    return found.to_dict()


def run_eval(request: Eval, overrides: Sequence[tuple[str, str]], console: Console) -> None:
    """Audit, measure, print, and write `results.json` and `audit.json`."""
    pair = load_pair(request, overrides)
    out = request.out or pair.folder / "eval"
    prompts = prompts_of(pair, request.prompts)
    _check_samples(request, pair)
    if not pair.drafters:
        _skeleton(pair, prompts, out, console)
        return
    drift = drift_of(pair, console)
    arms = audited_arms(pair, prompts, out, console, prove=request.audit)
    config = pair.recipe.eval
    if request.prompts is not None:
        config = config.model_copy(update={"prompts": request.prompts})
    results = evaluate(pair.target, arms, prompts, config)
    if drift is not None:
        results["target"]["drift"] = drift
    write_json(out / "results.json", results)
    show(results, console)
    _say_where(out / "results.json", console)
    if request.samples:
        _agreement(pair, prompts, request.samples, out, console)


def audited_arms(
    pair: Loaded, prompts: Sequence[Prompt], out: Path, console: Console, *, prove: bool = True
) -> list[Arm]:
    """Every drafter of the pair with the audit's verdict; without `prove` it is "not audited"."""
    arms = []
    for name, drafter in pair.drafters.items():
        verdict: dict[str, Any] = {}
        if prove:
            report = audit_pair(pair, prompts, out, console, name)
            verdict = {"verdict": report.verdict, "distance": report.distance}
        family = str(getattr(drafter, "family", name))
        arms.append(Arm(FAMILY_NAMES.get(family, family), drafter, **verdict))
    return arms


def _check_samples(request: Eval, pair: Loaded) -> None:
    """Now, and not behind an audit of minutes."""
    if request.samples < 0:
        raise RequestError(f"--samples is {request.samples}; expected 1 or more, or 0 for none")
    if request.samples and not pair.drafters:
        raise RequestError(f"--samples measures a speculative method, which {SKELETON} is not")
    if request.samples and not any(pair.recipe.eval.temperatures):
        raise RequestError("--samples needs a temperature above 0; eval.temperatures has none")


FAMILY_NAMES = {"draft_model": "draft model", "intersection": "draft, shared tokens",
                "retokenised": "draft, re-tokenised", "adaptive-draft": "adaptive draft",
                "early_exit": "early exit"}  # fmt: skip


def _skeleton(pair: Loaded, prompts: Sequence[Prompt], out: Path, console: Console) -> None:
    """Skeleton-of-Thought beside plain decoding: latency, length and calls, no acceptance."""
    from ..decoding.sampling import Warper
    from ..eval.skeleton import evaluate_skeleton, skeleton_table

    config = pair.recipe.eval
    found = [
        evaluate_skeleton(
            pair.target, prompts,
            warper=Warper(temperature, config.top_k, config.top_p, config.min_p),
            max_new_tokens=config.max_new_tokens, seed=config.seed,
        )
        for temperature in config.temperatures
    ]  # fmt: skip
    for each in found:
        console.print(skeleton_table(each), crop=False)
        console.print()
    write_json(out / "skeleton.json", found)
    _say_where(out / "skeleton.json", console)


def _agreement(
    pair: Loaded, prompts: Sequence[Prompt], samples: int, out: Path, console: Console
) -> None:
    """Agreement of samples with the greedy answer, and the majority vote, in one batch each."""
    from ..decoding.sampling import Warper
    from ..eval.agreement import agreement, agreement_table

    config = pair.recipe.eval
    warm = next(each for each in config.temperatures if each > 0)
    found = agreement(
        pair.target, pair.drafter, first_turns(pair, prompts), samples=samples,
        warper=Warper(warm, config.top_k, config.top_p, config.min_p),
        max_new_tokens=config.max_new_tokens, eos_ids=pair.target.eos_ids, seed=config.seed,
    )  # fmt: skip
    write_json(out / "agreement.json", found)
    console.print()
    console.print(agreement_table(found), crop=False)
    _say_where(out / "agreement.json", console)


def run_audit(request: Audit, overrides: Sequence[tuple[str, str]], console: Console) -> bool:
    """Run the audit alone, or one of the probes in its place; whether it passed.

    Raises:
        DraftsmithError: a probe failed; the message says what of.
    """
    _check_audit(request)
    if request.survey:
        _survey(overrides, request.out or Path(), console)
        return True
    pair = load_pair(request, overrides)
    if not pair.drafters:
        raise RequestError(f"{SKELETON} is not lossless: there is nothing to audit")
    say_tuned(pair, console)
    prompts = prompts_of(pair, request.prompts)
    out = request.out or pair.folder / "eval"
    if request.determinism:
        _determinism(pair, prompts, out, console)
        return True
    reports = [
        audit_pair(pair, prompts, out, console, name, plant=request.plant, decoder=request.decoder)
        for name in pair.drafters
    ]
    return not any(each.failures for each in reports)


def _check_audit(request: Audit) -> None:
    """Refuse flags that exclude each other, and a method that a flag would pass over in silence."""
    asked = {
        "--plant": request.plant is not None, "--decoder hf": request.decoder == "hf",
        "--determinism": request.determinism, "--survey": request.survey,
    }  # fmt: skip
    flags = [flag for flag, is_set in asked.items() if is_set]
    if len(flags) > 1:
        raise RequestError(f"{' and '.join(flags)} exclude each other; leave all but one out")
    if request.survey:
        if request.run_folder or request.target or request.drafter:
            raise RequestError("--survey decodes in miniature: leave out run, target and drafter")
    elif flags and request.method != "trained":
        raise RequestError(f"{flags[0]} takes the trained drafter alone: leave out --method")


def _survey(overrides: Sequence[tuple[str, str]], out: Path, console: Console) -> None:
    from ..eval.survey import survey, survey_table

    config = load_recipe("distill-tiny", overrides).recipe.audit
    found = survey(config)
    console.print(survey_table(found), crop=False)
    write_json(out / "survey.json", found)
    _say_where(out / "survey.json", console)
    if not found["passed"]:
        raise DraftsmithError(
            "the survey failed: a p below its level, rows that differ alone, or a bug missed; "
            "with more --audit.sequences fewer bugs are missed"
        )


def _determinism(pair: Loaded, prompts: Sequence[Prompt], out: Path, console: Console) -> None:
    from ..eval.determinism import probe_determinism

    drafter = pair.drafter
    if not isinstance(drafter, DraftModel):
        raise RequestError(
            "--determinism compares verify calls of chosen widths, which takes a draft model"
        )
    found = probe_determinism(
        pair.target, drafter, first_turns(pair, prompts),
        max_new_tokens=pair.recipe.eval.max_new_tokens,
    )  # fmt: skip
    console.print(found.text(), markup=False)
    write_json(out / "determinism.json", found.to_dict())
    _say_where(out / "determinism.json", console)
    if not found.passed:
        raise DraftsmithError(
            "the determinism probe failed: a greedy text differs by more than rounding explains"
        )


def audit_pair(
    pair: Loaded, prompts: Sequence[Prompt], out: Path, console: Console,
    name: str | None = None, **how: Any,
) -> AuditReport:  # fmt: skip
    """Audit a method (the first by default); `audit.json` is the first one's."""
    first = next(iter(pair.drafters))
    name = name or first
    report = audit(
        pair.target, pair.drafters[name], first_turns(pair, prompts), pair.recipe.audit,
        rule=pair.recipe.eval.rule, **how,
    )  # fmt: skip
    if len(pair.drafters) > 1:
        console.print(f"{name}:")
    console.print(report.text(), markup=False)
    parts = ["audit"]
    if name != first:
        parts.append(name)
    if how.get("plant") is not None:
        parts.append(f"planted-{how['plant']}")
    if how.get("decoder", "draftsmith") != "draftsmith":
        parts.append(how["decoder"])
    write_json(out / f"{'-'.join(parts)}.json", report.to_dict())
    return report


def first_turns(pair: Loaded, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of the prompts' first turns."""
    limit = pair.recipe.eval.prompt_tokens
    return [render(prompt, pair.target.tokenizer, limit=limit) for prompt in prompts]


def prompts_of(pair: Loaded, source: str | None) -> list[Prompt]:
    """The prompts of a measurement: those of `source`, or the recipe's."""
    config = pair.recipe.eval
    return load_prompts(source or config.prompts, limit=config.limit, seed=config.seed)


def _say_where(path: Path, console: Console) -> None:
    """Brackets in a path are no markup, and it is not cut in two."""
    console.print(f"results: {path}", markup=False, soft_wrap=True)


def write_json(path: Path, content: Any) -> None:
    """Write a result so that people can read it too."""
    write_text(path, json.dumps(content, indent=1) + "\n")
