"""`draftsmith compare`: any number of drafters and methods on one target, in one interleaved run.

Every drafter is loaded, audited and decodes in turn with all others on the same prompts, with the same random streams:
ours and those that others published. What is done is kept in the folder of the comparison, each audit and the rows of
each temperature, so the same command goes on where it was stopped. Read next: `run.py`, the same for one drafter;
`eval/report/paper.py`, the table of such a folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.prompts import Prompt
from ...decoding.backbone.backbone import Backbone
from ...decoding.proposal import Proposer
from ...drafters.families import FAMILIES
from ...drafters.hub import shown
from ...eval.audit.audit import audit
from ...eval.audit.enumeration import Enumeration
from ...eval.audit.toys import toy_of
from ...eval.config import EvalConfig
from ...eval.measure.arms import Arm, check_answer_length
from ...eval.measure.environment import drafter_hash, environment, target_hash
from ...eval.measure.evaluate import evaluate
from ...eval.measure.requests import Request, first_turns, make_requests
from ...eval.report.tables import show
from ...eval.tune.settings import in_words
from ...storage import writable_folder, write_text
from ...storage.identity import check_identity_file
from ..check.early import NamedFolders
from ..drafted import load_trained
from ..methods import TRAINED, make_method
from .contenders import whose
from .loaded import load_named_target, say_ends
from .run import check_rooms, left_out, prompts_of, repeat_of, say_where, write_answers, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..requests import CompareRequest

_MOST_READ = 500_000_000
"""Bytes of a file of training rows that is looked through for the prompts."""


def run_compare(
    request: CompareRequest, overrides: Sequence[tuple[str, str]], pairs: Sequence[NamedFolders], console: Console
) -> dict[str, Any]:
    """Audit, measure, print, and write `results.json` and `answers.jsonl`, as `eval` does; the former's content."""
    out, recipe = writable_folder(request.out), pairs[0].recipe
    config = recipe.eval.model_copy(update={"prompts": request.prompts, "sweep": []})
    target = load_named_target(pairs[0])
    prompts = prompts_of(config, recipe.data)
    if any(each.chat for each in prompts):
        say_ends(target, console)
    requests = make_requests(target, prompts, config)
    named = [(pair, name) for pair in pairs for name in pair.methods]
    arms = [arm_of(pair, name, target) for pair, name in named]
    check_answer_length(arms, config)
    check_rooms(target, arms, requests, config, recipe.audit if request.audit else None)
    for line in unlike(pairs, prompts):
        console.print(line, markup=False, soft_wrap=True)
    identity = _identity(arms, pairs, target, config, requests) | {"audited": request.audit}
    if not check_identity_file(out / "compared.json", identity, remedy="name another --out"):
        write_json(out / "compared.json", identity)
    if request.audit:
        counted: dict[str, Enumeration] = {}
        arms = [_audited(at, arm, target, requests, pairs[0], out, console, counted) for at, arm in enumerate(arms)]
    for (pair, _), arm in zip(named, arms, strict=True):  # an audit sets a length of its own
        arm.at(pair.recipe.eval.draft_length if arm.sweeps else None)
    parts = [_part(target, arms, requests, config, each, out, console) for each in config.temperatures]
    answers = [line for part in parts for line in part.pop("answers", [])]
    results = parts[0] | {
        "rows": [row for part in parts for row in part["rows"]],
        "settings": config.model_dump(),
        "left_out": left_out(prompts, requests),
        "second": [],
        "repeat": [repeat_of(request, "compare", overrides)],
    }
    write_json(out / "results.json", results)
    write_answers(out, answers)
    show(results, console)
    say_where(out / "results.json", console)
    return results


def arm_of(pair: NamedFolders, name: str, target: Backbone) -> Arm:
    """One of the compared, not audited, by a name that no other has."""

    def trained() -> Proposer:
        return load_trained(pair.drafter or "", pair.recipe, target)

    drafter = make_method(name, pair.recipe, target, trained)
    title = FAMILIES[str(getattr(drafter, "family", name))].title
    if pair.drafter is None:
        return Arm(title, drafter)
    between = "of" if name == TRAINED else "around"
    return Arm(
        f"{title} {between} {whose(pair.drafter)}",
        drafter,
        path=shown(pair.drafter),
        sha256=drafter_hash(pair.drafter),
    )


def unlike(pairs: Sequence[NamedFolders], prompts: Sequence[Prompt]) -> Iterator[str]:
    """What of the comparison is not alike, for a reader to judge: how each was set, and what it was trained on."""
    settings = {_named(pair): pair.tuned for pair in pairs}
    tuned = {name: each for name, each in settings.items() if each.measured}
    for name, each in tuned.items():
        how = "plain decoding, as nothing was faster" if each.plain else in_words(each.values) or "its recipe's own"
        yield f"{name}: tuned for {each.measured} to {how}"
    if tuned and len(tuned) < len(settings):
        others = ", ".join(name for name in settings if name not in tuned)
        how = "`draftsmith tune` tunes; what it finds for methods is named by --tuned"
        yield f"! not tuned, so drafting as recipes have it: {others} ({how})"
    for pair in pairs:
        if pair.folder != Path() and (count := seen_in(Path(str(pair.recipe.data.source)), prompts)):
            yield f"! {count} of {len(prompts)} prompts stand in what {_named(pair)} was trained on"


def seen_in(source: Path, prompts: Sequence[Prompt]) -> int:
    """How many prompts' first turns stand, word for word, in a file of training rows that is here."""
    if not source.is_file() or source.stat().st_size > _MOST_READ:
        return 0
    rows = source.read_bytes()
    spelled = (
        [json.dumps(each.turns[0], ensure_ascii=ascii)[1:-1].encode() for ascii in (True, False)] for each in prompts
    )
    return sum(any(text in rows for text in both) for both in spelled)


def _named(pair: NamedFolders) -> str:
    return whose(pair.drafter) if pair.drafter is not None else ", ".join(pair.methods)


def _identity(
    arms: Sequence[Arm],
    pairs: Sequence[NamedFolders],
    target: Backbone,
    config: EvalConfig,
    requests: Sequence[Request],
) -> dict[str, Any]:
    """What the kept parts of a comparison hang on."""
    machine = environment()
    return {
        "target": target_hash(target),
        "loaded": pairs[0].recipe.target.model_dump(mode="json", exclude={"path"}),
        "arms": [[arm.name, arm.sha256 or ""] for arm in arms],  # their audits are kept by their places
        "settings": [pair.recipe.drafter.model_dump(mode="json") for pair in pairs],
        "lengths": [pair.recipe.eval.draft_length for pair in pairs],
        "eval": config.model_dump(mode="json", exclude={"draft_length"}),
        "audit": pairs[0].recipe.audit.model_dump(mode="json"),
        "requests": len(requests),
        "asked": hashlib.sha256(json.dumps(first_turns(requests)).encode()).hexdigest()[:16],
        "processor": machine["processor"],
        "threads": machine["threads"],
    }


def _audited(
    at: int,
    arm: Arm,
    target: Backbone,
    requests: Sequence[Request],
    pair: NamedFolders,
    out: Path,
    console: Console,
    counted: dict[str, Enumeration],
) -> Arm:
    """The arm with its verdict, which is taken from the folder where it is there.

    `counted`: what was enumerated over a toy, by its name: it stands for every drafter of its code.
    """
    path = out / f"audit-{at + 1}.json"
    if not path.is_file():
        recipe, toy = pair.recipe, toy_of(arm.drafter)
        known = counted.get(toy)
        report = audit(
            target, arm.drafter, first_turns(requests), recipe.audit, rule=recipe.eval.rule, enumerated=known
        )
        if report.enumeration is not None:
            counted[toy] = report.enumeration
        console.print(f"{arm.name}:", markup=False)
        console.print(report.text(), markup=False)
        write_json(path, report.to_dict())
    found = json.loads(path.read_text(encoding="utf-8"))
    return replace(arm, verdict=found["verdict"], distance=found["distance"])


def _part(
    target: Backbone,
    arms: Sequence[Arm],
    requests: Sequence[Request],
    config: EvalConfig,
    temperature: float,
    out: Path,
    console: Console,
) -> dict[str, Any]:
    """The results at one temperature with their answers, measured where they are not there yet."""
    path = out / f"temperature-{temperature:g}.json"
    if path.is_file():
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept
    console.print(f"measuring {len(arms)} in turn at T = {temperature:g} ...")
    alone = config.model_copy(update={"temperatures": [temperature]})
    answers: list[dict[str, Any]] = []
    made = evaluate(target, arms, requests, alone, own_lengths=True, answers=answers) | {"answers": answers}
    write_text(path, json.dumps(made) + "\n")
    return made
