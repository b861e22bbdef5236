"""Measure a drafter on prompts with the real decoder: acceptance, speed, the best draft length.

`evaluate` returns what `results.json` holds (schema: `results.schema.json`). Acceptance is never
reported without the audit's verdict beside it; "not audited" is one. Read next: `requests.py`, what
is decoded; `metrics.py`, `speed.py`, `report/tables.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.hidden_states import layer_count
from ...decoding.backbone.recurrence.scan import recurrent_layers
from ...drafters.identity import shown_name
from ..config import EvalConfig
from ..report.answers import answers_of
from ..report.pieces import pieces_of
from ..report.results import SCHEMA_VERSION
from .arms import Arm, check_answer_length
from .by_set import set_fields
from .environment import environment, target_hash
from .metrics import acceptance, acceptance_fields, degeneracy
from .requests import Request, in_turn
from .rounds import AllRounds, decode, speed_fields
from .speed import Costs, bytes_of, experts_read, measure_costs

_SIZES = (2, 3, 5, 9, 17, 33, 65)  # nodes of the verify calls that are timed


def evaluate(
    target: Backbone,
    arms: Sequence[Arm],
    requests: Sequence[Request],
    config: EvalConfig,
    *,
    left_out: int = 0,
    own_lengths: bool = False,
    answers: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """One row of results per method and temperature, and the first one's sweep of draft lengths.

    Args:
        left_out: turns that are not among the requests, being too long, for the result.
        own_lengths: every drafter drafts as it is set, whatever `config.draft_length` says.
        answers: filled with what was written for each request (`eval/report/answers.py`); None where nobody keeps it.

    Raises:
        RequestError: `config.max_new_tokens` is too small for a step to count.
    """
    check_answer_length(arms, config)
    context = int(np.median([len(each.ids) for each in requests])) + config.max_new_tokens // 2
    sweeping = config.sweep if arms[0].sweeps else []
    for arm in arms:
        arm.at(config.draft_length if arm.sweeps and not own_lengths else None)
    widest = max(arm.drafter.nodes for arm in arms)
    sizes = sorted({*sweeping, widest - 1, *(n - 1 for n in _SIZES if n < widest)})
    model = next((arm.backbone for arm in arms if arm.backbone is not None), None)
    text = [each for request in requests for each in request.ids]
    costs = measure_costs(target, model, sizes, context=context, rows=min(config.batch, len(requests)), text=text)
    costs = replace(costs, experts=experts_read(target, text, [n + 1 for n in sizes]))
    rows = []
    for temperature in config.temperatures:
        runs = decode(target, [(arm, None) for arm in arms], requests, config, temperature)
        decoded = list(zip(arms, runs, strict=True))
        rows += [_row(target, arm, requests, run, config, temperature, costs) for arm, run in decoded]
        if answers is not None:
            answers += answers_of(target.tokenizer, requests, decoded, config, temperature)
    return {
        "schema_version": SCHEMA_VERSION,
        "rows": rows,
        "left_out": left_out,
        "sweep": _sweep(target, arms[0], requests, config, costs) if sweeping else [],
        "costs": {
            "target_call_ms": costs.target_call_seconds * 1e3,
            "c": costs.c,
            "c_v": {str(k): v for k, v in costs.c_v.items()},
            "context": context,
        },
        "settings": config.model_dump(),
        "target": _described(target, costs),
        "draft": {
            "bytes": max(arm.draft_bytes for arm in arms),
            "loaded": [
                {"method": arm.name, "path": arm.path, "sha256": arm.sha256} for arm in arms if arm.path is not None
            ],
            "settings": {},
        },
        "repeat": [],
        "environment": environment(),
    }


def _described(target: Backbone, costs: Costs) -> dict[str, Any]:
    """The target, and what makes its verify calls dearer than those of a dense model that attends in every layer."""
    made: dict[str, Any] = {"name": shown_name(target), "sha256": target_hash(target), "bytes": bytes_of(target.model)}
    if costs.experts is not None:
        made["experts"] = costs.experts.to_dict()
    recurrent = recurrent_layers(target.model)
    if recurrent:
        made["recurrent"] = {"layers": recurrent, "of": layer_count(target.model)}
    return made


def _row(
    target: Backbone,
    arm: Arm,
    requests: Sequence[Request],
    run: AllRounds,
    config: EvalConfig,
    temperature: float,
    costs: Costs,
) -> dict[str, Any]:
    measured = acceptance(run.counts, seed=config.seed)
    text = degeneracy(run.baseline_texts)
    # an adaptive draft takes as many steps as it drafts tokens, not as many as it may
    steps = max(0.0, min(arm.drafter.draft_steps, run.mean_nodes - 1))
    experts = costs.experts
    one_call = bytes_of(target.model) if experts is None else experts.call_bytes[1]
    verify = 1.0 if experts is None else experts.growth(run.mean_nodes)
    read = arm.proposal_bytes / one_call * steps / (arm.drafter.draft_steps or 1)
    steps = steps or 1.0  # looking up once
    c = _step_cost(arm, run, costs, steps)
    c_v = costs.verify(run.mean_nodes)
    predicted = measured.tau.value / (c_v + steps * c)
    return {
        "method": arm.name,
        "temperature": temperature,
        "prompts": config.prompts,
        "requests": len(requests),
        "draft_length": arm.drafter.draft_length,
        "draft_steps": steps,
        "nodes": arm.drafter.nodes,
        "mean_nodes": run.mean_nodes or None,  # no call where every answer ends with its first token
        "rule": config.rule,
        "verdict": arm.verdict,
        "audited": arm.audited,
        "distance": arm.distance,
        **acceptance_fields(measured),
        "mbsu": _or_null(measured.tau.value / (verify + read)),
        "c": c,
        "c_v": c_v,
        "predicted_speedup": _or_null(predicted),
        **speed_fields(run, config.seed),
        "distinct_2": text.distinct_2,
        "loop_share": text.loop_share,
        "flagged": text.flagged,
        "differing_rows": run.differing if temperature == 0 else None,
        "categories": _categories(requests, run, config.seed, arm.verdict),
        **set_fields(requests, run, config, arm.verdict),
        "sample": _sample(target, requests, run),
    }


def _step_cost(arm: Arm, run: AllRounds, costs: Costs, steps: float) -> float:
    """Where a step is no call of one token by a causal LM, the time of proposing is shared out over the steps."""
    if arm.backbone is not None and costs.c is not None:
        return costs.c
    return run.proposing_cost / steps


def _categories(requests: Sequence[Request], run: AllRounds, seed: int, verdict: str) -> list[dict[str, Any]]:
    rows = []
    for category in sorted({each.prompt.category for each in requests}):
        mine = [count for each, count in zip(requests, run.counts, strict=True) if each.prompt.category == category]
        fields = acceptance_fields(acceptance(mine, seed=seed))
        rows.append({"category": category, "requests": len(mine), "verdict": verdict, **fields})
    return rows


def _sweep(
    target: Backbone, arm: Arm, requests: Sequence[Request], config: EvalConfig, costs: Costs
) -> list[dict[str, Any]]:
    """Acceptance, cost and speed against the draft length, greedy."""
    some = in_turn(requests)[: config.sweep_prompts]
    runs = decode(target, [(arm, length) for length in config.sweep], some, config, 0.0)
    rows = []
    for length, run in zip(config.sweep, runs, strict=True):
        measured = acceptance(run.counts, seed=config.seed)
        steps = arm.at(length).drafter.draft_steps
        c = _step_cost(arm, run, costs, steps)
        predicted = replace(costs, c=c).predicted_speedup(measured.tau.value, length, draft_steps=steps)
        rows.append(
            {
                "draft_length": length,
                "verdict": arm.verdict,
                "tau": measured.tau.to_list(),
                "alpha": measured.alpha.to_list(),
                "c": c,
                "c_v": costs.c_v[length],
                "predicted_speedup": _or_null(predicted),
                "speedup": speed_fields(run, config.seed)["speedup"],
            }
        )
    arm.at(config.draft_length)
    return rows


def _or_null(value: float) -> float | None:
    """JSON knows no NaN, which stands for "no whole step was seen"."""
    return None if math.isnan(value) else value


def _sample(target: Backbone, requests: Sequence[Request], run: AllRounds) -> list[dict[str, Any]]:
    """The first requests' texts, token by token with their origin, for the report."""
    shown = []
    emitted = [
        (tokens, origin) for each in run.generations for tokens, origin in zip(each.tokens, each.origin, strict=True)
    ]
    for request, (tokens, origin) in list(zip(requests, emitted, strict=True))[:3]:
        pieces = pieces_of(target.tokenizer, tokens)
        shown.append(
            {
                "id": request.prompt.id,
                "prompt": target.tokenizer.decode(request.ids)[-400:],
                "tokens": [list(pair) for pair in zip(pieces, origin, strict=True)],
            }
        )
    return shown
