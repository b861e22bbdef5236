"""`eval` and `audit`: from a run folder, or a target and a drafter, to results on disk.

Read next: `eval/measure/evaluate.py`, `eval/audit/audit.py`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.config import DataConfig
from ...data.prompts import Prompt, fitting, load_prompts, second_set
from ...decoding.backbone.backbone import Backbone
from ...drafters.families import FAMILIES
from ...drafters.hub import PREFIX, shown
from ...drafters.model.draft_model import DraftModel
from ...errors import DraftsmithError, RequestError
from ...eval.audit.audit import AuditReport, audit
from ...eval.config import AuditConfig, EvalConfig
from ...eval.measure.arms import Arm, check_answer_length, check_context
from ...eval.measure.environment import drafter_hash
from ...eval.measure.evaluate import evaluate
from ...eval.measure.requests import Request, first_turns, make_requests
from ...eval.measure.second import second_rows
from ...eval.report.answers import ANSWERS, as_lines
from ...eval.report.tables import show
from ...storage import writable_folder, write_text
from ...storage.identity import flat
from ..check.early import NamedFolders
from ..methods import SKELETON
from ..recipe.load import without_run
from .loaded import (
    Loaded,
    drift_of,
    load_pair,
    of_first,
    say_changed_target,
    say_ends,
    say_length,
    say_no_sweep,
    say_tuned,
    speaks,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..requests import AuditRequest, EvalRequest


def run_eval(
    request: EvalRequest, overrides: Sequence[tuple[str, str]], console: Console, named: NamedFolders
) -> None:
    """Audit, measure, print, and write `results.json`, `answers.jsonl` and `audit.json`."""
    out, console = results_folder(request), of_first(console)
    say_tuned(named, console)
    pair = load_pair(named)
    say_length(named, pair, overrides, console)
    config = pair.recipe.eval
    if request.prompts is not None:
        config = config.model_copy(update={"prompts": request.prompts})
    prompts = prompts_of(config, pair.recipe.data)
    if any(each.chat for each in prompts):
        say_ends(pair.target, console)
    _check_samples(request, pair)
    if not pair.drafters:
        _skeleton(pair, prompts, out, console)
        return
    arms = arms_of(pair)
    say_no_sweep(next(iter(arms.values())), config, overrides, console)
    check_answer_length(list(arms.values()), config)
    requests = make_requests(pair.target, prompts, config)
    check_rooms(pair.target, list(arms.values()), requests, config, pair.recipe.audit if request.audit else None)
    drift = drift_of(pair, console)
    if request.audit:
        arms = audited(pair, arms, first_turns(requests), out, console)
    count, answers = left_out(prompts, requests), list[dict[str, Any]]()
    results = evaluate(pair.target, list(arms.values()), requests, config, left_out=count, answers=answers)
    results["second"] = second_of(pair, list(arms.values()), prompts, config, results["rows"])
    if drift is not None:
        results["target"]["drift"] = drift
    results["draft"]["settings"] = flat(pair.recipe.drafter.model_dump(mode="json"))
    results["repeat"] = _repeat(request, [*named.tuned.values.items(), *overrides], pair)
    write_json(out / "results.json", results)
    write_answers(out, answers)
    show(results, console)
    say_where(out / "results.json", console)
    if request.samples:
        _agreement(pair, first_turns(requests), request.samples, out, console)


def check_rooms(
    target: Backbone, arms: Sequence[Arm], requests: Sequence[Request], config: EvalConfig, audit: AuditConfig | None
) -> None:
    """Now, not behind an audit of minutes, raise RequestError where the target's context is too short for either."""
    longest = max(len(each.ids) for each in requests)
    check_context(target, arms, config, longest, answer=("eval.max_new_tokens", config.max_new_tokens))
    if audit is not None:
        longest = max(map(len, first_turns(requests)[: _audited_prompts(audit)]))
        own = config.model_copy(update={"draft_length": audit.draft_length, "sweep": []})
        check_context(target, arms, own, longest, answer=("audit.max_new_tokens", audit.max_new_tokens))


def _audited_prompts(audit: AuditConfig) -> int:
    """How many prompts an audit decodes at least: as many as it replays, and as its sampled tokens take."""
    answers = -(-audit.tokens // max(audit.max_new_tokens - 1, 1))
    return max(audit.prompts, -(-answers // audit.batch) * audit.batch)


def arms_of(pair: Loaded) -> dict[str, Arm]:
    """Every drafter of the pair, not audited, by the name of its method."""
    arms = {}
    for name, drafter in pair.drafters.items():
        family = str(getattr(drafter, "family", name))
        path = pair.paths.get(name)
        sha256 = drafter_hash(path) if path is not None and path.is_dir() else None
        arms[name] = Arm(FAMILIES[family].title, drafter, path=None if path is None else shown(path), sha256=sha256)
    return arms


def audited(
    pair: Loaded, arms: Mapping[str, Arm], prompts: Sequence[Sequence[int]], out: Path, console: Console
) -> dict[str, Arm]:
    """The arms, each with the verdict of its own audit on these token ids."""
    reports = {name: audit_pair(pair, prompts, out, console, name) for name in arms}
    return {
        name: replace(arm, verdict=reports[name].verdict, distance=reports[name].distance)
        for name, arm in arms.items()
    }


def second_of(
    pair: Loaded, arms: Sequence[Arm], first: Sequence[Prompt], config: EvalConfig, rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of the second prompt set; none where `config` names none."""
    if config.second_prompts is None:
        return []
    prompts = second_set(config.second_prompts, first, limit=config.limit, seed=config.seed, data=pair.recipe.data)
    requests = make_requests(pair.target, prompts, config)
    return second_rows(pair.target, arms, requests, config, rows)


def results_folder(request: EvalRequest | AuditRequest) -> Path:
    """The folder for results, tried before anything is loaded."""
    if request.out is not None:
        return writable_folder(request.out)
    if request.run_folder is not None:
        return writable_folder(request.run_folder / "eval")
    # of a path the last two parts: many a folder is called `drafter`
    of = Path((request.drafter or request.method.replace(",", "-")).removeprefix(PREFIX)).parts[-2:]
    return writable_folder(Path("-".join(["eval", *(part for part in of if part.strip("./"))])))


def _repeat(request: EvalRequest, overrides: Sequence[tuple[str, str]], pair: Loaded) -> list[str]:
    """What was typed, behind the training of each run whose drafter was measured."""
    runs = {path.parent: path.parent / "run.yaml" for path in pair.paths.values()}
    lines = [
        shlex.join(["draftsmith", "train", str(recipe), "--out", str(run)])
        for run, recipe in runs.items()
        if recipe.is_file()
    ]
    return [*lines, repeat_of(request, "eval", overrides)]


def repeat_of(request: object, verb: str, overrides: Sequence[tuple[str, str]]) -> str:
    """What was typed, as a line for a shell."""
    arguments = ["draftsmith", verb]
    for field in fields(request):  # type: ignore[arg-type]
        value, flag = getattr(request, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if field.name == "run_folder" or field.default is MISSING:
            arguments.append(str(value))
        elif value is False:
            arguments.append(f"--no-{flag}")
        elif isinstance(value, tuple):
            arguments += [f"--{flag}", *map(str, value)]
        else:
            arguments += [f"--{flag}", str(value)]
    # as one word each: a value may begin with a dash
    arguments += [f"--{name}={value}" for name, value in overrides]
    return shlex.join(arguments)


def _check_samples(request: EvalRequest, pair: Loaded) -> None:
    """Now, and not behind an audit of minutes."""
    if request.samples < 0:
        raise RequestError(f"--samples is {request.samples}; expected 1 or more, or 0 for none")
    if request.samples and not pair.drafters:
        raise RequestError(f"--samples measures a speculative method, which {SKELETON} is not")
    if request.samples and not any(pair.recipe.eval.temperatures):
        raise RequestError("--samples needs a temperature above 0; eval.temperatures has none")


def _skeleton(pair: Loaded, prompts: Sequence[Prompt], out: Path, console: Console) -> None:
    """Skeleton-of-Thought beside plain decoding: latency, length and calls, no acceptance."""
    from ...decoding.sampling import Warper
    from ...eval.measure.skeleton import evaluate_skeleton, skeleton_table

    config = pair.recipe.eval
    prompts = fitting(prompts, pair.target.tokenizer, config.prompt_tokens, warn=True)
    results = [
        evaluate_skeleton(
            pair.target,
            prompts,
            warper=Warper.of(config, temperature),
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
        )
        for temperature in config.temperatures
    ]
    for each in results:
        console.print(skeleton_table(each), crop=False)
        console.print()
    write_json(out / "skeleton.json", results)
    say_where(out / "skeleton.json", console)


def _agreement(pair: Loaded, prompts: Sequence[Sequence[int]], samples: int, out: Path, console: Console) -> None:
    """Agreement of samples with the greedy answer, and the majority vote, in one batch each."""
    from ...decoding.sampling import Warper
    from ...eval.measure.agreement import agreement, agreement_table

    config = pair.recipe.eval
    warm = next(each for each in config.temperatures if each > 0)
    result = agreement(
        pair.target,
        pair.drafter,
        prompts,
        samples=samples,
        warper=Warper.of(config, warm),
        max_new_tokens=config.max_new_tokens,
        eos_ids=pair.target.eos_ids,
        seed=config.seed,
    )
    write_json(out / "agreement.json", result)
    console.print()
    console.print(agreement_table(result), crop=False)
    say_where(out / "agreement.json", console)


def run_audit(
    request: AuditRequest, overrides: Sequence[tuple[str, str]], console: Console, named: NamedFolders | None
) -> bool:
    """Run the audit alone, or one of the probes in its place; whether it passed.

    Args:
        named: what is audited; None with --survey.

    Raises:
        DraftsmithError: a probe failed; the message says what of.
    """
    console = of_first(console)
    if named is None:
        _survey(overrides, writable_folder(request.out or Path()), console)
        return True
    out = results_folder(request)
    say_tuned(named, console)
    pair = load_pair(named)
    say_changed_target(pair, console)
    say_length(named, pair, overrides, console)
    config = pair.recipe.eval
    if request.prompts is not None:
        config = config.model_copy(update={"prompts": request.prompts})
    prompts = first_turns(make_requests(pair.target, prompts_of(config, pair.recipe.data), config, later_turns=False))
    if request.determinism:
        _determinism(pair, prompts, out, console)
        return True
    reports = [
        audit_pair(pair, prompts, out, console, name, plant=request.plant, decoder=request.decoder)
        for name in pair.drafters
    ]
    return not any(each.failures for each in reports)


def _survey(overrides: Sequence[tuple[str, str]], out: Path, console: Console) -> None:
    from ...eval.audit.enumeration import survey, survey_table

    config = without_run(overrides).audit
    result = survey(config)
    console.print(survey_table(result), crop=False)
    write_json(out / "survey.json", result)
    say_where(out / "survey.json", console)
    if not result["passed"]:
        raise DraftsmithError(
            "the survey failed: a p below its level, rows that differ alone, or a bug missed; "
            "with more --audit.sequences fewer bugs are missed"
        )


def _determinism(pair: Loaded, prompts: Sequence[Sequence[int]], out: Path, console: Console) -> None:
    from ...eval.audit.determinism import probe_determinism

    drafter = pair.drafter
    if not isinstance(drafter, DraftModel):
        raise RequestError("--determinism compares verify calls of chosen widths, which takes a draft model")
    probe = probe_determinism(pair.target, drafter, prompts, max_new_tokens=pair.recipe.eval.max_new_tokens)
    console.print(probe.text(), markup=False)
    write_json(out / "determinism.json", probe.to_dict())
    say_where(out / "determinism.json", console)
    if not probe.passed:
        raise DraftsmithError("the determinism probe failed: a greedy text differs by more than rounding explains")


def audit_pair(
    pair: Loaded, prompts: Sequence[Sequence[int]], out: Path, console: Console, name: str, **how: Any
) -> AuditReport:
    """Audit a method on prompts' token ids; `audit.json` is the first method's."""
    first = next(iter(pair.drafters))
    report = audit(pair.target, pair.drafters[name], prompts, pair.recipe.audit, rule=pair.recipe.eval.rule, **how)
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


def prompts_of(config: EvalConfig, data: DataConfig | None = None) -> list[Prompt]:
    """The prompts of a measurement; arguments and errors as of `load_prompts`."""
    return load_prompts(config.prompts, limit=config.limit, seed=config.seed, data=data)


def left_out(prompts: Sequence[Prompt], requests: Sequence[Request]) -> int:
    """Turns of the prompts that are no request, being too long."""
    return sum(len(prompt.points) for prompt in prompts) - len(requests)


def say_where(path: Path, console: Console) -> None:
    """Name a file of results: brackets in a path are no markup, and it is not cut in two."""
    console.print(f"results: {path}", markup=False, soft_wrap=True)


def write_answers(out: Path, answers: Sequence[dict[str, Any]]) -> None:
    """Write what was written for each request beside the results, as `write_json` does."""
    if speaks():
        write_text(out / ANSWERS, as_lines(answers))


def write_json(path: Path, content: Any) -> None:
    """Write a result so that people can read it too; of several processes the first one does."""
    if speaks():
        write_text(path, json.dumps(content, indent=1) + "\n")
