"""`eval --server` and `audit --server`: a running engine in place of our own decoder.

Read next: `eval/server/measure.py`, `eval/server/audit.py`; `run.py`, the same by our decoder.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.generate.server_defaults import filled_in
from ...data.prompts import Prompt, fitting_ids
from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.hub import generation_settings, load_tokenizer
from ...decoding.backbone.loading import load_target
from ...errors import DraftsmithError, EnvironmentFailure
from ...eval.config import EvalConfig
from ...eval.measure.arms import NOT_AUDITED
from ...eval.measure.environment import environment
from ...eval.measure.requests import make_requests
from ...eval.report.results import results_of_others
from ...eval.report.server import show_server
from ...eval.server import answers, measure
from ...eval.server.audit import ServerAudit, audit_server
from ...eval.server.measure import Load
from ...eval.server.rows import Encode, Subject, server_rows
from ...storage import delete_folder, writable_folder
from ..check.server import NamedServer
from .run import prompts_of, repeat_of, say_where, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..requests import AuditRequest, EvalRequest

_log = logging.getLogger(__name__)


def run_server_eval(
    request: EvalRequest, overrides: Sequence[tuple[str, str]], named: NamedServer, console: Console
) -> None:
    """Audit if the target is named, measure, print, and write `results.json` and `audit.json`."""
    out = _folder(request)
    config = _config(request, named)
    verdict = NOT_AUDITED
    notes: list[str] = []
    prompts, encode = prompts_of(config, named.recipe.data), None
    if named.target is not None:
        prompts, encode = _fitted(named, prompts, config)
        notes += _filled_in(named)
    if request.audit and named.target is not None:
        report = _audit(named, config, out, console)
        if report.verdict == "undecided":
            notes.append(f"the audit is undecided: {report.why}")
        else:
            verdict = report.verdict
    elif request.audit:
        notes.append("not audited: an audit compares with the target, and no --target is named")
    loads = [Load(concurrency=each) for each in request.concurrency or (() if request.rate else (1,))]
    loads += [Load(rate=each) for each in request.rate]
    servers = [named.server, *([] if named.baseline is None else [named.baseline])]
    plans = measure.plan(len(prompts), loads, config.temperatures, requests=request.requests)
    blocks = measure.measure_blocks(prompts, plans, servers, config, out)
    subject = Subject(named.server.model, prompts, verdict, named.promise, encode)
    results = _results(named, config, server_rows(blocks, subject, config), notes)
    # addresses without the user name and password that they may hold
    baseline = None if named.baseline is None else named.baseline.public_url
    shown = replace(request, server=named.server.public_url, baseline_server=baseline)
    results["repeat"] = [repeat_of(shown, "eval", overrides)]
    write_json(out / "results.json", results)
    _keep(out)
    show_server(results, console)
    say_where(out / "results.json", console)


def run_server_audit(request: AuditRequest, named: NamedServer, console: Console) -> None:
    """Audit a server, print, and write `audit.json`.

    Raises:
        DraftsmithError: what it writes is not the target's own.
        EnvironmentFailure: it does not hand out what would decide.
    """
    out = _folder(request)
    for note in _filled_in(named):
        _log.warning("%s", note)
    report = _audit(named, _config(request, named), out, console)
    _keep(out)
    if report.verdict == "NOT lossless":
        raise DraftsmithError("the audit failed: what the server writes is not the target's own")
    if report.verdict == "undecided":
        raise EnvironmentFailure(f"the audit is undecided: {report.why}")


def _audit(named: NamedServer, config: EvalConfig, out: Path, console: Console) -> ServerAudit:
    target = _target(named)
    requests = make_requests(target, prompts_of(config, named.recipe.data), config, later_turns=False)
    audit = named.recipe.audit
    server = replace(named.server, max_new_tokens=audit.max_new_tokens, seed=audit.seed)
    report = audit_server(target, requests, server, audit, out)
    write_json(out / "audit.json", report.to_dict())
    console.print(report.text(), markup=False, soft_wrap=True)
    return report


def _filled_in(named: NamedServer) -> list[str]:
    """What servers add to requests by the target's own settings."""
    sentence = filled_in(generation_settings(named.target or "", revision=named.recipe.target.revision))
    return [] if sentence is None else [sentence]


def _target(named: NamedServer) -> Backbone:
    config = named.recipe.target
    return load_target(
        named.target or "",
        revision=config.revision,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        quantization=config.quantization,
    )


def _folder(request: EvalRequest | AuditRequest) -> Path:
    """The folder for results, tried before anything is asked."""
    if request.out is not None:
        return writable_folder(request.out)
    if request.run_folder is not None:
        return writable_folder(request.run_folder / "server")
    name = "-".join(part for part in Path(request.model or "").parts[-2:] if part.strip("./"))
    return writable_folder(Path(f"eval-{name or 'server'}"))


def _config(request: EvalRequest | AuditRequest, named: NamedServer) -> EvalConfig:
    """The recipe's, without what a server has no say in."""
    update: dict[str, Any] = {"sweep": []}
    if request.prompts is not None:
        update["prompts"] = request.prompts
    return named.recipe.eval.model_copy(update=update)


def _fitted(named: NamedServer, prompts: Sequence[Prompt], config: EvalConfig) -> tuple[list[Prompt], Encode]:
    """The prompts that our own decoder would take, texts cut as it cuts them; and the target's encoding."""
    own = named.recipe.target
    tokenizer: Any = load_tokenizer(named.target or "", revision=own.revision, trust_remote_code=own.trust_remote_code)
    fitted = [
        each if each.chat else replace(each, turns=(tokenizer.decode(ids, skip_special_tokens=True),))
        for each, ids in fitting_ids(prompts, tokenizer, config.prompt_tokens, warn=True)
    ]
    return fitted, lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _results(
    named: NamedServer, config: EvalConfig, rows: list[dict[str, Any]], notes: Sequence[str]
) -> dict[str, Any]:
    promise = named.promise
    return results_of_others(rows, named.server.model) | {
        "settings": config.model_dump(),
        "draft": {"bytes": 0, "loaded": [], "settings": {}},
        "environment": environment(),
        "server": {
            "url": named.server.public_url,
            "baseline_url": None if named.baseline is None else named.baseline.public_url,
            "model": named.server.model,
            "promise": None if promise is None else vars(promise),
            "notes": list(notes),
        },
    }


def _keep(out: Path) -> None:
    """What was asked and answered, beside the results; the next start asks anew."""
    for journal in (out / measure.JOURNAL, out / answers.JOURNAL):
        if journal.is_dir():
            shutil.copyfile(journal / "answers.jsonl", journal.with_suffix(".jsonl"))
            delete_folder(journal)
