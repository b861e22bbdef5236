"""The table of commands: what each takes, what it does, and whether it takes values of a recipe too.

A command checks what it can before it imports what computes: torch takes seconds. Read next: `requests.py`,
the arguments; `cli.py`, which calls these.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from .. import __version__
from ..data.rows.presets import presets
from ..drafters.hub import drafter_folder
from ..drafters.published.known import known_drafters
from ..errors import DraftsmithError, RequestError
from ..eval.measure.environment import environment
from ..storage import is_first, nearest_folder, writable_folder, write_text
from . import requests
from .check.early import (
    check_adapt,
    check_audit,
    check_chat,
    check_compare,
    check_least,
    check_prompts,
    check_tree,
    check_tune,
    named,
)
from .check.server import check_server
from .generate import generate
from .recipe.load import find_recipe, headline, load_recipe, shipped_recipes
from .screen import console, say

Values: TypeAlias = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Verb:
    """A command; its help is the request's docstring."""

    request: type
    run: Callable[..., str | None]
    """Takes the request, and the values of a recipe where it has any; what it returns is said."""
    takes_values: bool = False


def _ls(request: requests.LsRequest) -> str | None:
    from rich.table import Table

    if request.drafters and request.sources:
        raise RequestError("--drafters and --sources list two things; give one of them")
    if request.drafters:
        return _known(request.target)
    if request.target is not None:
        listed = "sources" if request.sources else "recipes"
        raise RequestError(f"--target chooses among published drafters, and {listed} are listed; give --drafters")
    if request.sources:
        return _sets()
    table = Table("recipe", "method", "what it does")
    for path in shipped_recipes():
        table.add_row(path.stem, *headline(path))
    console().print(table)
    return None


def _known(target: str | None) -> str:
    """A line for each drafter of the list, which is wider than most terminals."""
    every, found = known_drafters(), known_drafters(target)
    if not found:
        return f"none for {target} among the {len(every)} that are listed; the hub may have others"
    for each in found:
        say(f"hub:{each.name}  for {each.target}: {each.form}, licence {each.licence or 'not stated'}, {each.page}")
    return "as those pages state it; none was loaded here: `draftsmith inspect-drafter` says how one is read"


def _sets() -> str:
    for name, each in presets().items():
        say(f"{name}  {each.good_for}: {' and '.join(each.columns)}, licence {each.licence}, {each.origin}")
    return "as their cards state it; NAME@REVISION takes another commit, NAME=FILE a copy of your own"


def _recommend(request: requests.RecommendRequest) -> str:
    from .recommend.recommend import recommend

    return recommend(request.target)


def _show(request: requests.ShowRequest, overrides: Values) -> None:
    resolved = load_recipe(request.recipe, overrides)
    for path, origin in resolved.origin.items():
        value: object = resolved.recipe
        for part in path.split("."):
            value = getattr(value, part)
        say(f"{path:28} {value!s:24} {origin}")


def _copy(request: requests.CopyRequest) -> str:
    if request.path.exists():
        raise RequestError(f"{request.path} exists; name a new file")
    text = find_recipe(request.recipe).read_text(encoding="utf-8")
    writable_folder(request.path.parent)
    write_text(request.path, text)
    return f"{request.path}: edit it, then `draftsmith check {request.path}`"


def _check(request: requests.CheckRequest, overrides: Values) -> None:
    from .check.check import check

    check(load_recipe(request.recipe, overrides), console(), request.out)


def _train(request: requests.TrainRequest, overrides: Values) -> None:
    resolved = load_recipe(request.recipe, overrides)
    from .train import train

    out = request.out or Path("runs") / resolved.recipe.name
    outcome = train(resolved, out=out, resume=request.resume)
    if is_first():
        loss = outcome.validation_loss
        held_out = "" if loss != loss else f", held-out loss {loss:.3f}"
        say(f"trained {outcome.steps} steps{held_out}")
        if outcome.best is not None:
            say(f"best draft: step {outcome.best['step']:.0f}, not audited yet")
        if resolved.recipe.record.has_target:
            say(f"next: draftsmith eval {out}")


def _eval(request: requests.EvalRequest, overrides: Values) -> None:
    check_prompts(request.prompts)
    if (served := check_server(request, overrides)) is not None:
        from .measure.server import run_server_eval

        run_server_eval(request, overrides, served, console())
        return
    pair = named(request, overrides, tuned=True)
    from .measure.run import run_eval

    run_eval(request, overrides, console(), pair)


def _audit(request: requests.AuditRequest, overrides: Values) -> None:
    check_prompts(request.prompts)
    if (served := check_server(request, overrides)) is not None:
        from .measure.server import run_server_audit

        run_server_audit(request, served, console())
        return
    pair = check_audit(request, overrides)
    from .measure.run import run_audit

    if not run_audit(request, overrides, console(), pair):
        raise DraftsmithError("the audit failed: the output is not the target's own")


def _tree(request: requests.TreeRequest, overrides: Values) -> str:
    check_tree(request, overrides)
    from .measure.tree import run_tree

    return f"tree: {run_tree(request, overrides, console())}"


def _tune(request: requests.TuneRequest, overrides: Values) -> None:
    check_prompts(request.prompts)
    pairs = check_tune(request, overrides)
    from .measure.tune import run_tune

    run_tune(request, pairs, console())


def _compare(request: requests.CompareRequest, overrides: Values) -> None:
    check_prompts(request.prompts)
    pairs = check_compare(request, overrides)
    from .measure.compare import run_compare

    run_compare(request, overrides, pairs, console())


def _adapt(request: requests.AdaptRequest, overrides: Values) -> str:
    check_adapt(request, overrides)
    from .train.adapt import run_adapt

    return f"the drafter in use: {run_adapt(request, overrides, say)}"


def _chat(request: requests.ChatRequest, overrides: Values) -> None:
    pair = check_chat(request, overrides)
    from .chat import chat

    chat(request, pair, console())


def _inspect(request: requests.InspectRequest, overrides: Values) -> str:
    resolved = load_recipe(request.recipe, overrides)
    from .inspect import inspect

    return inspect(resolved, request.rows)


def _datastore(request: requests.DatastoreRequest) -> str:
    from .derive import build

    return build(request)


def _convert(request: requests.ConvertRequest) -> str:
    from .convert import convert

    return convert(request)


def _convert_drafter(request: requests.ConvertDrafterRequest) -> str:
    from .convert import convert_drafter

    return convert_drafter(request)


def _convert_results(request: requests.ConvertResultsRequest) -> str:
    from .share.spec_bench import convert_results

    return convert_results(request)


def _inspect_drafter(request: requests.InspectDrafterRequest) -> str:
    check_least(request, limit=2, prompt_tokens=1, max_new_tokens=2)
    folder = drafter_folder(request.drafter)
    from .measure.readings import run_inspect_drafter

    return run_inspect_drafter(request, folder, console())


def _derive(request: requests.DeriveRequest) -> str:
    from .derive import derive

    return derive(request)


def _report(request: requests.ReportRequest) -> str:
    writable_folder(request.run_folder)
    if request.beside and not (request.markdown or request.latex):
        raise RequestError("--beside names rows of a table, and no table is asked for; add --markdown or --latex")
    if request.others:
        from ..eval.report.comparison import write_comparison

        page, made = write_comparison([request.run_folder, *request.others]), list[Path]()
    else:
        from ..eval.report.report import write_report

        page, made = write_report(request.run_folder), list[Path]()
    if request.markdown or request.latex:
        from ..eval.report.paper import write_tables

        beside = [*request.others, *request.beside]
        made = write_tables(request.run_folder, beside, markdown=request.markdown, latex=request.latex)
    return "\n".join([f"report: {page}", *(f"table: {path}" for path in made)])


def _export(request: requests.ExportRequest) -> str:
    from .export import export

    return export(request)


def _push(request: requests.PushRequest) -> str:
    from .share.push import push

    return push(request)


def _quickstart(request: requests.QuickstartRequest) -> None:
    check_least(request, steps=1)
    from .quickstart import quickstart

    quickstart(request.out, console(), request.steps)


def _doctor(_request: requests.DoctorRequest) -> str:
    """A block to paste; no user names, no paths, no tokens."""
    known = {"draftsmith": __version__, "git": _git_state(), **environment()}
    return json.dumps({**known, "now": _now()}, indent=1)


def _now() -> dict[str, object]:
    """What commands meet at this moment: room, devices, and whether the embedded target loads."""
    import psutil
    import torch
    from huggingface_hub.constants import HF_HUB_CACHE

    from ..decoding.backbone.loading import load_target
    from ..decoding.devices import multiplies_bf16

    try:
        target = f"loads, {load_target('tiny').model.num_parameters():,} parameters"
    except Exception as error:  # noqa: BLE001  # whatever it is, it belongs into the report; its words may name folders
        target = f"fails: {type(error).__name__}"
    return {
        "free_memory_gb": round(psutil.virtual_memory().available / 1e9, 1),
        "free_disk_gb": {"here": _free_gb(Path.cwd()), "cache of the hub": _free_gb(Path(HF_HUB_CACHE))},
        "bf16_on_cpu": "multiplied" if multiplies_bf16() else "emulated",
        "cards": [_card(index) for index in range(torch.cuda.device_count())],
        "embedded_target": target,
    }


def _free_gb(folder: Path) -> float:
    """Of the disk that it is on, or will be."""
    return round(shutil.disk_usage(nearest_folder(folder)).free / 1e9, 1)


def _card(index: int) -> dict[str, object]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    capability = torch.cuda.get_device_capability(index)
    return {"free_gb": round(free / 1e9, 1), "memory_gb": round(total / 1e9, 1), "capability": capability}


VERBS: dict[str, Verb] = {
    "ls": Verb(requests.LsRequest, _ls),
    "recommend": Verb(requests.RecommendRequest, _recommend),
    "show": Verb(requests.ShowRequest, _show, takes_values=True),
    "copy": Verb(requests.CopyRequest, _copy),
    "check": Verb(requests.CheckRequest, _check, takes_values=True),
    "train": Verb(requests.TrainRequest, _train, takes_values=True),
    "eval": Verb(requests.EvalRequest, _eval, takes_values=True),
    "audit": Verb(requests.AuditRequest, _audit, takes_values=True),
    "report": Verb(requests.ReportRequest, _report),
    "inspect": Verb(requests.InspectRequest, _inspect, takes_values=True),
    "quickstart": Verb(requests.QuickstartRequest, _quickstart),
    "datastore": Verb(requests.DatastoreRequest, _datastore),
    "derive": Verb(requests.DeriveRequest, _derive),
    "convert": Verb(requests.ConvertRequest, _convert),
    "convert-drafter": Verb(requests.ConvertDrafterRequest, _convert_drafter),
    "convert-results": Verb(requests.ConvertResultsRequest, _convert_results),
    "inspect-drafter": Verb(requests.InspectDrafterRequest, _inspect_drafter),
    "generate": Verb(requests.GenerateRequest, generate, takes_values=True),
    "tree": Verb(requests.TreeRequest, _tree, takes_values=True),
    "tune": Verb(requests.TuneRequest, _tune, takes_values=True),
    "compare": Verb(requests.CompareRequest, _compare, takes_values=True),
    "adapt": Verb(requests.AdaptRequest, _adapt, takes_values=True),
    "chat": Verb(requests.ChatRequest, _chat, takes_values=True),
    "export": Verb(requests.ExportRequest, _export),
    "push": Verb(requests.PushRequest, _push),
    "doctor": Verb(requests.DoctorRequest, _doctor),
}


def _git_state() -> str:
    root = Path(__file__).parent.parent
    try:
        commit = _git(root, "rev-parse", "--short", "HEAD")
        changed = _git(root, "status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return commit + (" with changes" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    process = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return process.stdout.strip()
