"""`--server`: what is asked of a server, and what cannot be asked. No torch here, no network.

Read next: `launch/measure/server.py`, which does what is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...data.generate.server_request import ServerRequest
from ...drafters.tuned_file import Promise, read_promise
from ...errors import RequestError
from ..recipe.load import without_run
from ..recipe.model import Recipe
from ..requests import AuditRequest, EvalRequest
from .early import check_least, named_target

# what a recipe says of asking a server; the rest says how our own decoder works
_OF_EVAL = ("prompts", "limit", "prompt_tokens", "max_new_tokens", "temperatures", "top_k", "top_p", "min_p", "seed")
_OF_AUDIT = ("tokens", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "batch", "prompts", "seed")
_READ = {*(f"eval.{name}" for name in _OF_EVAL), *(f"audit.{name}" for name in _OF_AUDIT)}
_READ |= {"data.template_values", "data.template_date"}
_SERVERS_ALONE = ("model", "baseline_server", "concurrency", "rate", "requests", "retries", "timeout")
_DECODERS_ALONE = ("method", "samples", "plant", "decoder", "determinism", "survey")


@dataclass(frozen=True)
class NamedServer:
    """What a command names, nothing of it loaded."""

    recipe: Recipe
    target: str | None
    server: ServerRequest
    baseline: ServerRequest | None = None
    promise: Promise | None = None
    """Of the drafter that the server is said to have."""


def check_server(request: EvalRequest | AuditRequest, overrides: Sequence[tuple[str, str]]) -> NamedServer | None:
    """What is asked of which server; None without --server.

    Raises:
        RequestError: a flag or value that would be passed over, is out of its range, or is missing.
    """
    if request.server is None:
        _check_unset(request, _SERVERS_ALONE, "says something of a --server, and none is given")
        return None
    _check_unset(request, _DECODERS_ALONE, "says how our own decoder works: leave out it, or --server")
    if request.model is None:
        raise RequestError("--server needs --model, the name that the server knows the target by")
    named = request.run_folder is not None or request.target is not None
    _check_values(overrides, named=named)
    if isinstance(request, AuditRequest) and not named:
        raise RequestError("an audit compares with the target: name its folder by --target, or a run")
    recipe, target = without_run(overrides), None
    if named:
        recipe, _, target = named_target(request, overrides, {name for name, _ in overrides})
    if isinstance(request, AuditRequest):
        _check_filters(recipe)
    most = _check_numbers(request)
    server = _server(request.server, request, recipe, most)
    if isinstance(request, AuditRequest):
        return NamedServer(recipe, target, server)
    baseline = None if request.baseline_server is None else _server(request.baseline_server, request, recipe, most)
    return NamedServer(recipe, target, server, baseline, _promise(request))


def _server(url: str, request: EvalRequest | AuditRequest, recipe: Recipe, most: int) -> ServerRequest:
    config, audit = recipe.eval, recipe.audit
    new = audit.max_new_tokens if isinstance(request, AuditRequest) else config.max_new_tokens
    asked = ServerRequest(
        url,
        request.model or "",
        0.0,
        config.top_k,
        config.top_p,
        new,
        audit.seed if isinstance(request, AuditRequest) else config.seed,
        concurrency=most,
        retries=request.retries,
        timeout=request.timeout,
        min_p=config.min_p,
    )
    _ = asked.base_url  # refuses what is no URL
    return asked


def _check_numbers(request: EvalRequest | AuditRequest) -> int:
    """The most requests that may be under way at a time.

    Raises:
        RequestError: a number is out of its range.
    """
    check_least(request, retries=0)
    if not request.timeout > 0:
        raise RequestError(f"--timeout is {request.timeout}; expected seconds, more than 0")
    if isinstance(request, AuditRequest):
        check_least(request, concurrency=1)
        return request.concurrency
    check_least(request, requests=1)
    if any(each < 1 for each in request.concurrency):
        raise RequestError(f"--concurrency is {min(request.concurrency)}; expected 1 or more")
    if any(not 0 < each < float("inf") for each in request.rate):
        raise RequestError(f"--rate is {min(request.rate):g}; expected requests a second, more than 0")
    # what arrives by the clock is under way at once if the server is slow
    return max([*request.concurrency, 1, *([256] if request.rate else [])])


def _check_filters(recipe: Recipe) -> None:
    """Raise RequestError for filters of which engines make different distributions."""
    audit = recipe.audit
    on = [name for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if getattr(audit, name) != off]
    if len(on) > 1:
        raise RequestError(
            f"{' and '.join(f'audit.{name}' for name in on)} are on, and engines apply them in different orders, each "
            "a distribution of its own; audit with one of them at a time"
        )


def _check_values(overrides: Sequence[tuple[str, str]], *, named: bool) -> None:
    for name, _ in overrides:
        if name not in _READ and not name.startswith("target."):
            raise RequestError(f"--{name} has no say at a server, which decodes as it was started; leave it out")
        if name == "eval.prompt_tokens" and not named:
            raise RequestError(f"--{name} counts tokens, which takes the target's tokenizer: name --target, or a run")


def _check_unset(request: EvalRequest | AuditRequest, names: Sequence[str], reason: str) -> None:
    """Raise RequestError for a flag that was typed and would be passed over."""
    fields = type(request).__dataclass_fields__
    for name in names:
        if name in fields and getattr(request, name) != fields[name].default:
            raise RequestError(f"--{name.replace('_', '-')} {reason}")


def _promise(request: EvalRequest) -> Promise | None:
    """What was predicted for the drafter that --drafter or the run names; a run need not be tuned."""
    if request.drafter is not None:
        return read_promise(Path(request.drafter))
    if request.run_folder is None:
        return None
    drafter = request.run_folder / "drafter"
    return read_promise(drafter) if (drafter / "tuned.json").is_file() else None
