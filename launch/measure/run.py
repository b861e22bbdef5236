"""`eval` and `audit`: from a run folder, or a target and a drafter, to results on disk.

Read next: `eval/measure/evaluate.py`, `eval/audit/audit.py`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.prompts import Prompt, fitting, load_prompts, render
from ...decoding.proposal import Proposer
from ...decoding.target.backbone import Backbone
from ...decoding.target.loading import load_target
from ...drafters.model.draft_model import DraftModel
from ...drafters.registry import load_drafter
from ...errors import DraftsmithError, RequestError
from ...eval.audit.audit import AuditReport, audit
from ...eval.measure.evaluate import Arm, evaluate
from ...eval.report.tables import show
from ...storage import writable_folder, write_text
from ..check.early import check_audit, named, tuned_target
from ..generate import drafter_hash
from ..recipe.load import Recipe, load_recipe
from .methods import NEED_DRAFT, SKELETON, make_method, split_methods

if TYPE_CHECKING:
    from rich.console import Console

    from ..verbs import Audit, Eval, Pair


@dataclass(frozen=True)
class Loaded:
    """A target and its drafters ready to decode, the recipe that says how, the run's folder."""

    recipe: Recipe
    target: Backbone
    drafters: dict[str, Proposer]
    """By the name of the method, in the order asked for."""
    folder: Path
    paths: dict[str, Path]
    """By the name of the method, the folders of those drafters that were read from one."""

    @property
    def drafter(self) -> Proposer:
        """The first one."""
        return next(iter(self.drafters.values()))


def load_pair(pair: Pair, overrides: Sequence[tuple[str, str]]) -> Loaded:
    """The target and drafter of a run folder, or those that --target and --drafter name."""
    found = named(pair, overrides)
    names, recipe, drafter_path = split_methods(pair.method), found.recipe, found.drafter
    target = load_target(
        found.target,
        revision=recipe.target.revision,
        dtype=recipe.target.dtype,
        trust_remote_code=recipe.target.trust_remote_code,
    )

    def trained() -> Proposer:
        return load_drafter(drafter_path or "", target, draft_length=recipe.eval.draft_length, config=recipe.drafter)

    drafters = {name: make_method(name, recipe, target, trained) for name in names if name != SKELETON}
    paths = {name: Path(drafter_path or "") for name in drafters if name in NEED_DRAFT}
    return Loaded(recipe, target, drafters, found.folder, paths)


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
        markup=False,
        soft_wrap=True,
    )
    return recipe


def drift_of(pair: Loaded, console: Console) -> dict[str, Any] | None:
    """How far a run has moved its target from the original, on the run's held-out rows.

    None where no run has.
    """
    recipe = say_tuned(pair, console)
    if recipe is None:
        return None
    from ...data.rows.prepare import prepare
    from ...eval.measure.drift import measure_drift

    config = recipe.target
    original = load_target(
        config.path,
        revision=config.revision,
        dtype=config.dtype,
        device=str(pair.target.device),
        trust_remote_code=config.trust_remote_code,
    )
    rows = prepare(recipe.data, pair.target.tokenizer, out=None).validation
    loop = recipe.loop
    found = measure_drift(original, pair.target, rows, count=loop.validate_rows, seed=loop.seed)
    return found.to_dict()


def run_eval(request: Eval, overrides: Sequence[tuple[str, str]], console: Console) -> None:
    """Audit, measure, print, and write `results.json` and `audit.json`."""
    out = results_folder(request)
    pair = load_pair(request, overrides)
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
    results["draft"]["settings"] = pair.recipe.drafter.model_dump(mode="json")
    results["repeat"] = _repeat(request, overrides, pair)
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
        path = pair.paths.get(name)
        if path is not None:
            verdict |= {"path": str(path), "sha256": drafter_hash(path) if path.is_dir() else None}
        arms.append(Arm(FAMILY_NAMES.get(family, family), drafter, **verdict))
    return arms


def results_folder(request: Eval | Audit) -> Path:
    """The folder for results, tried before anything is loaded."""
    if request.out is not None:
        return writable_folder(request.out)
    if request.run_folder is not None:
        return writable_folder(request.run_folder / "eval")
    # of a path the last two parts: many a folder is called `drafter`
    of = Path(request.drafter or request.method.replace(",", "-")).parts[-2:]
    return writable_folder(Path("-".join(["eval", *(part for part in of if part.strip("./"))])))


def _repeat(request: Eval, overrides: Sequence[tuple[str, str]], pair: Loaded) -> list[str]:
    """What was typed, behind the training of each run whose drafter was measured."""
    runs = {path.parent: path.parent / "run.yaml" for path in pair.paths.values()}
    lines = [
        shlex.join(["draftsmith", "train", str(recipe), "--out", str(run)])
        for run, recipe in runs.items()
        if recipe.is_file()
    ]
    words = ["draftsmith", "eval"]
    for field in fields(request):
        value, flag = getattr(request, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if field.name == "run_folder":
            words.append(str(value))
        elif value is False:
            words.append(f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    # as one word each: a value may begin with a dash
    words += [f"--{name}={value}" for name, value in overrides]
    return [*lines, shlex.join(words)]


def _check_samples(request: Eval, pair: Loaded) -> None:
    """Now, and not behind an audit of minutes."""
    if request.samples < 0:
        raise RequestError(f"--samples is {request.samples}; expected 1 or more, or 0 for none")
    if request.samples and not pair.drafters:
        raise RequestError(f"--samples measures a speculative method, which {SKELETON} is not")
    if request.samples and not any(pair.recipe.eval.temperatures):
        raise RequestError("--samples needs a temperature above 0; eval.temperatures has none")


FAMILY_NAMES = {
    "draft_model": "draft model",
    "intersection": "draft, shared tokens",
    "retokenised": "draft, re-tokenised",
    "adaptive-draft": "adaptive draft",
    "early_exit": "early exit",
}


def _skeleton(pair: Loaded, prompts: Sequence[Prompt], out: Path, console: Console) -> None:
    """Skeleton-of-Thought beside plain decoding: latency, length and calls, no acceptance."""
    from ...decoding.sampling import Warper
    from ...eval.measure.skeleton import evaluate_skeleton, skeleton_table

    config = pair.recipe.eval
    prompts = fitting(prompts, pair.target.tokenizer, config.prompt_tokens)
    found = [
        evaluate_skeleton(
            pair.target,
            prompts,
            warper=Warper(temperature, config.top_k, config.top_p, config.min_p),
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
        )
        for temperature in config.temperatures
    ]
    for each in found:
        console.print(skeleton_table(each), crop=False)
        console.print()
    write_json(out / "skeleton.json", found)
    _say_where(out / "skeleton.json", console)


def _agreement(pair: Loaded, prompts: Sequence[Prompt], samples: int, out: Path, console: Console) -> None:
    """Agreement of samples with the greedy answer, and the majority vote, in one batch each."""
    from ...decoding.sampling import Warper
    from ...eval.measure.agreement import agreement, agreement_table

    config = pair.recipe.eval
    warm = next(each for each in config.temperatures if each > 0)
    found = agreement(
        pair.target,
        pair.drafter,
        first_turns(pair, prompts),
        samples=samples,
        warper=Warper(warm, config.top_k, config.top_p, config.min_p),
        max_new_tokens=config.max_new_tokens,
        eos_ids=pair.target.eos_ids,
        seed=config.seed,
    )
    write_json(out / "agreement.json", found)
    console.print()
    console.print(agreement_table(found), crop=False)
    _say_where(out / "agreement.json", console)


def run_audit(request: Audit, overrides: Sequence[tuple[str, str]], console: Console) -> bool:
    """Run the audit alone, or one of the probes in its place; whether it passed.

    Raises:
        DraftsmithError: a probe failed; the message says what of.
    """
    check_audit(request, overrides)
    if request.survey:
        _survey(overrides, writable_folder(request.out or Path()), console)
        return True
    out = results_folder(request)
    pair = load_pair(request, overrides)
    say_tuned(pair, console)
    prompts = prompts_of(pair, request.prompts)
    if request.determinism:
        _determinism(pair, prompts, out, console)
        return True
    reports = [
        audit_pair(pair, prompts, out, console, name, plant=request.plant, decoder=request.decoder)
        for name in pair.drafters
    ]
    return not any(each.failures for each in reports)


def _survey(overrides: Sequence[tuple[str, str]], out: Path, console: Console) -> None:
    from ...eval.audit.survey import survey, survey_table

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
    from ...eval.audit.determinism import probe_determinism

    drafter = pair.drafter
    if not isinstance(drafter, DraftModel):
        raise RequestError("--determinism compares verify calls of chosen widths, which takes a draft model")
    found = probe_determinism(
        pair.target, drafter, first_turns(pair, prompts), max_new_tokens=pair.recipe.eval.max_new_tokens
    )
    console.print(found.text(), markup=False)
    write_json(out / "determinism.json", found.to_dict())
    _say_where(out / "determinism.json", console)
    if not found.passed:
        raise DraftsmithError("the determinism probe failed: a greedy text differs by more than rounding explains")


def audit_pair(
    pair: Loaded, prompts: Sequence[Prompt], out: Path, console: Console, name: str | None = None, **how: Any
) -> AuditReport:
    """Audit a method (the first by default); `audit.json` is the first one's."""
    first = next(iter(pair.drafters))
    name = name or first
    report = audit(
        pair.target,
        pair.drafters[name],
        first_turns(pair, prompts),
        pair.recipe.audit,
        rule=pair.recipe.eval.rule,
        **how,
    )
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
    """Token ids of the first turns of the prompts that fit."""
    tokenizer, most = pair.target.tokenizer, pair.recipe.eval.prompt_tokens
    return [render(each, tokenizer, limit=most) for each in fitting(prompts, tokenizer, most)]


def prompts_of(pair: Loaded, source: str | None) -> list[Prompt]:
    """The prompts of a measurement, those of `source` or the recipe's; says how many do not fit.

    Raises:
        RequestError: none does.
    """
    config = pair.recipe.eval
    prompts = load_prompts(source or config.prompts, limit=config.limit, seed=config.seed)
    # here once: whoever decodes them leaves the same ones out, and counts them
    fitting(prompts, pair.target.tokenizer, config.prompt_tokens, warn=True)
    return prompts


def _say_where(path: Path, console: Console) -> None:
    """Brackets in a path are no markup, and it is not cut in two."""
    console.print(f"results: {path}", markup=False, soft_wrap=True)


def write_json(path: Path, content: Any) -> None:
    """Write a result so that people can read it too."""
    write_text(path, json.dumps(content, indent=1) + "\n")
