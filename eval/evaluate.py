"""Measure a drafter on prompts with the real decoder: acceptance, speed, the best draft length.

`evaluate` returns what `results.json` holds (schema: `results.schema.json`). Acceptance is never
reported without the audit's verdict beside it; "not audited" is one. Read next: `metrics.py`,
`speed.py`, `tables.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..data.prompts import Prompt, render
from ..decoding.backbone import Backbone
from ..decoding.engine import Generation, autoregressive, generate
from ..decoding.sampling import Warper
from ..drafters.draft_model import DraftModel
from .config import EvalConfig
from .degeneracy import degeneracy
from .environment import environment
from .metrics import Acceptance, Counts, acceptance, counts_of, ratio
from .results import SCHEMA_VERSION
from .speed import Costs, bytes_of, measure_costs

NOT_AUDITED = "not audited"


@dataclass
class Request:
    """One turn of one prompt."""

    prompt: Prompt
    ids: list[int]
    number: int


@dataclass
class Run:
    """All requests decoded once per arm and repeat."""

    counts: list[Counts] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    seconds_R: list[float] = field(default_factory=list)
    baseline_seconds_R: list[float] = field(default_factory=list)
    tokens_R: list[int] = field(default_factory=list)
    baseline_tokens_R: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    differing: int = 0
    baseline_texts: list[list[int]] = field(default_factory=list)

    def add(self, base: Generation, own: Generation, *, first: bool) -> None:
        """Take in a batch decoded by both. Its first token comes from the prefill, timed apart."""
        self.seconds_R.append(own.decode_seconds)
        self.baseline_seconds_R.append(base.decode_seconds)
        self.tokens_R.append(sum(len(t) - 1 for t in own.tokens))
        self.baseline_tokens_R.append(sum(len(t) - 1 for t in base.tokens))
        if first:
            self.counts += counts_of(own.steps)
            self.generations.append(own)
            self.baseline_texts += base.tokens
            self.differing += sum(a != b for a, b in zip(own.tokens, base.tokens, strict=True))
            self.prefill_seconds += own.prefill_seconds


def evaluate(
    target: Backbone, drafter: DraftModel, prompts: Sequence[Prompt], config: EvalConfig,
    *, name: str, verdict: str = NOT_AUDITED,
) -> dict[str, Any]:  # fmt: skip
    """One row of results per temperature, and the sweep over draft lengths.

    Args:
        name: of the method, in the tables.
        verdict: of the losslessness audit of this very pair.
    """
    requests = make_requests(target, prompts, config)
    context = int(np.median([len(each.ids) for each in requests])) + config.max_new_tokens // 2
    lengths = sorted({*config.sweep, config.draft_length})
    costs = measure_costs(target, drafter.backbone, lengths, context=context)
    drafter.draft_length = config.draft_length
    rows = [
        _row(target, drafter, requests, config, temperature, costs, name, verdict)
        for temperature in config.temperatures
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "rows": rows,
        "sweep": _sweep(target, drafter, requests, config, costs, verdict),
        "costs": {
            "target_call_ms": costs.target_call_seconds * 1e3, "c": costs.c,
            "c_v": {str(k): v for k, v in costs.c_v.items()}, "context": context,
        },
        "settings": config.model_dump(),
        "target": {"name": target.name.rsplit("/", 1)[-1], "bytes": bytes_of(target)},
        "draft": {"bytes": bytes_of(drafter.backbone)},
        "environment": environment(),
    }  # fmt: skip


def make_requests(target: Backbone, prompts: Sequence[Prompt], config: EvalConfig) -> list[Request]:
    """Every turn of every prompt; of earlier turns the target's own greedy answer is history."""
    requests: list[Request] = []
    warper = Warper(0.0)
    for prompt in prompts:
        answers: list[str] = []
        for turn in range(len(prompt.turns)):
            ids = render(prompt, target.tokenizer, answers=answers, limit=config.prompt_tokens)
            requests.append(Request(prompt, ids, len(requests)))
            if turn + 1 < len(prompt.turns):
                done = autoregressive(
                    target, [ids], warper=warper, max_new_tokens=config.max_new_tokens,
                    eos_ids=target.eos_ids,
                )  # fmt: skip
                text = target.tokenizer.decode(done.tokens[0], skip_special_tokens=True)
                answers.append(str(text))
    return requests


def _row(
    target: Backbone, drafter: DraftModel, requests: Sequence[Request], config: EvalConfig,
    temperature: float, costs: Costs, name: str, verdict: str,
) -> dict[str, Any]:  # fmt: skip
    length = config.draft_length
    run = decode(target, drafter, requests, config, temperature, [length])[length]
    found = acceptance(run.counts, seed=config.seed)
    text = degeneracy(run.baseline_texts)
    draft_share = bytes_of(drafter.backbone) / bytes_of(target)
    return {
        "method": name,
        "temperature": temperature,
        "prompts": config.prompts,
        "requests": len(requests),
        "draft_length": length,
        "verdict": verdict,
        **acceptance_fields(found),
        "mbsu": _or_null(found.tau.value / (1 + length * draft_share)),
        "c": costs.c,
        "c_v": costs.c_v[length],
        "predicted_speedup": _or_null(costs.predicted_speedup(found.tau.value, length)),
        **_speed_fields(run, config.seed),
        "distinct_2": text.distinct_2,
        "loop_share": text.loop_share,
        "flagged": text.flagged,
        "differing_rows": run.differing if temperature == 0 else None,
        "categories": _categories(requests, run, config.seed, verdict),
        "sample": _sample(target, requests, run),
    }


def acceptance_fields(found: Acceptance) -> dict[str, Any]:
    """The measures of acceptance under their names in `results.json`."""
    return {
        "tau": found.tau.to_list(),
        "tau_macro": found.tau_macro.to_list(),
        "alpha": found.alpha.to_list(),
        "alpha_hat": found.alpha_hat.to_list(),
        "n_alpha": [each.to_list() for each in found.n_alpha],
        "n_alpha_counts": found.n_alpha_counts,
        "steps": found.steps,
        "truncated_steps": found.truncated_steps,
    }


def decode(
    target: Backbone, drafter: DraftModel, requests: Sequence[Request], config: EvalConfig,
    temperature: float, lengths: Sequence[int],
) -> dict[int, Run]:  # fmt: skip
    """Baseline and every draft length in turn on each batch, `repeats` times.

    Acceptance comes from the first repeat: the later ones draw the same numbers again.
    """
    warper = Warper(temperature, config.top_k, config.top_p, config.min_p)
    runs = {length: Run() for length in lengths}
    _warm_up(target, drafter, requests, warper)
    for at in range(0, len(requests), config.batch):
        part = requests[at : at + config.batch]
        common: dict[str, Any] = {
            "warper": warper, "max_new_tokens": config.max_new_tokens, "eos_ids": target.eos_ids,
            "seed": config.seed, "requests": [each.number for each in part],
        }  # fmt: skip
        ids = [each.ids for each in part]
        for repeat in range(config.repeats):
            base = autoregressive(target, ids, **common)
            for length, run in runs.items():
                drafter.draft_length = length
                run.add(base, generate(target, drafter, ids, **common), first=repeat == 0)
    return runs


def _warm_up(
    target: Backbone, drafter: DraftModel, requests: Sequence[Request], warper: Warper
) -> None:
    ids = [requests[0].ids]
    autoregressive(target, ids, warper=warper, max_new_tokens=8)
    generate(target, drafter, ids, warper=warper, max_new_tokens=8)


def _speed_fields(run: Run, seed: int) -> dict[str, Any]:
    own, base = np.array(run.seconds_R), np.array(run.baseline_seconds_R)
    tokens, base_tokens = np.array(run.tokens_R, float), np.array(run.baseline_tokens_R, float)
    # seconds per token of the baseline over seconds per token of ours, resampled by batch
    scaled = base * tokens / np.maximum(base_tokens, 1)
    speedup = ratio(scaled, own, seed=seed)
    return {
        "tokens_per_second": float(tokens.sum() / own.sum()) if own.sum() else None,
        "baseline_tokens_per_second": float(base_tokens.sum() / base.sum()) if base.sum() else None,
        "speedup": speedup.to_list(),
        "prefill_seconds": run.prefill_seconds,
    }


def _categories(
    requests: Sequence[Request], run: Run, seed: int, verdict: str
) -> list[dict[str, Any]]:
    found = []
    for category in sorted({each.prompt.category for each in requests}):
        mine = [
            count
            for each, count in zip(requests, run.counts, strict=True)
            if each.prompt.category == category
        ]
        fields = acceptance_fields(acceptance(mine, seed=seed))
        found.append({"category": category, "requests": len(mine), "verdict": verdict, **fields})
    return found


def _sweep(
    target: Backbone, drafter: DraftModel, requests: Sequence[Request], config: EvalConfig,
    costs: Costs, verdict: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """Acceptance, cost and speed against the draft length, greedy."""
    some = requests[: config.sweep_prompts]
    runs = decode(target, drafter, some, config, 0.0, config.sweep)
    drafter.draft_length = config.draft_length
    found = []
    for length, run in runs.items():
        measured = acceptance(run.counts, seed=config.seed)
        found.append(
            {
                "draft_length": length,
                "verdict": verdict,
                "tau": measured.tau.to_list(),
                "alpha": measured.alpha.to_list(),
                "c": costs.c,
                "c_v": costs.c_v[length],
                "predicted_speedup": _or_null(costs.predicted_speedup(measured.tau.value, length)),
                "speedup": _speed_fields(run, config.seed)["speedup"],
            }
        )
    return found


def _or_null(value: float) -> float | None:
    """JSON knows no NaN, which stands for "no whole step was seen"."""
    return None if math.isnan(value) else value


def _pieces(target: Backbone, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; of a character in several tokens the last one shows it."""
    pieces, written = [], ""
    for count in range(1, len(tokens) + 1):
        text = str(target.tokenizer.decode(list(tokens[:count])))
        # an unfinished character decodes as a replacement sign until its last byte is there
        piece = "" if text.endswith("\ufffd") and count < len(tokens) else text[len(written) :]
        pieces.append(piece)
        written += piece
    return pieces


def _sample(target: Backbone, requests: Sequence[Request], run: Run) -> list[dict[str, Any]]:
    """The first requests' texts, token by token with their origin, for the report."""
    shown = []
    emitted = [
        (tokens, origin)
        for each in run.generations
        for tokens, origin in zip(each.tokens, each.origin, strict=True)
    ]
    for request, (tokens, origin) in list(zip(requests, emitted, strict=True))[:3]:
        pieces = _pieces(target, tokens)
        shown.append(
            {
                "id": request.prompt.id,
                "prompt": target.tokenizer.decode(request.ids)[-400:],
                "tokens": [list(pair) for pair in zip(pieces, origin, strict=True)],
            }
        )
    return shown
