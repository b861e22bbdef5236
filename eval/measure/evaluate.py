"""Measure a drafter on prompts with the real decoder: acceptance, speed, the best draft length.

`evaluate` returns what `results.json` holds (schema: `results.schema.json`). Acceptance is never
reported without the audit's verdict beside it; "not audited" is one. Read next: `requests.py`, what
is decoded; `metrics.py`, `speed.py`, `tables.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...data.prompts import Prompt
from ...decoding.engine import Generation, autoregressive, generate
from ...decoding.proposal import Proposer
from ...decoding.sampling import Warper
from ...decoding.target.backbone import Backbone
from ...drafters.identity import shown_name
from ...drafters.model.adaptive import AdaptiveDraft
from ...drafters.model.draft_model import DraftModel
from ...drafters.model.ensemble import Ensemble
from ..config import EvalConfig
from ..report.results import SCHEMA_VERSION
from .degeneracy import degeneracy
from .environment import environment
from .metrics import Acceptance, Counts, acceptance, counts_of, ratio
from .requests import Request, make_requests
from .speed import Costs, bytes_of, measure_costs

NOT_AUDITED = "not audited"
_SIZES = (2, 3, 5, 9, 17, 33, 65)  # nodes of the verify calls that are timed


@dataclass(frozen=True)
class Arm:
    """A method as one row of the tables: a drafter, and what the audit said of it."""

    name: str
    drafter: Proposer
    verdict: str = NOT_AUDITED
    distance: float | None = None
    """Of a lossy rule: its measured total variation."""
    path: str | None = None
    """Of the drafter's folder, as it was asked for; None where there is none."""
    sha256: str | None = None
    """Of that folder's config and weights."""

    def at(self, length: int | None) -> Arm:
        """The same with another draft length, where it has one to set."""
        if length is not None and isinstance(self.drafter, (DraftModel, Ensemble)):
            self.drafter.draft_length = length
        return self

    @property
    def backbone(self) -> Backbone | None:
        """The drafting model, None where there is none."""
        return self.drafter.backbone if isinstance(self.drafter, DraftModel) else None

    @property
    def draft_bytes(self) -> int:
        """Bytes of the weights that drafting reads; 0 where there is no model of its own.

        An early exit's are the target's, and they count. Members of an ensemble run one after
        another, so what two of them share counts for both.
        """
        if isinstance(self.drafter, Ensemble):
            return sum(bytes_of(each.module, each.adapters_read) for each in self.drafter.members)
        module = getattr(self.drafter, "module", None)
        return 0 if module is None else bytes_of(module)

    @property
    def proposal_bytes(self) -> int:
        """Bytes of the weights that a proposal reads, as often as it reads them.

        A draft model reads all of its own in every step. Heads and feature drafters say what they
        read (`weights_read`), the target's projection included where they have none.
        """
        read = getattr(self.drafter, "weights_read", None)
        if read is None:
            return self.drafter.draft_steps * self.draft_bytes
        return sum(bytes_of(module) for module in read)

    @property
    def sweeps(self) -> bool:
        """Whether its draft length can be chosen."""
        if isinstance(self.drafter, Ensemble):
            return True
        return isinstance(self.drafter, DraftModel) and not isinstance(self.drafter, AdaptiveDraft)


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
    propose_seconds: float = 0.0
    target_calls: int = 0
    nodes: int = 0
    differing: int = 0
    baseline_texts: list[list[int]] = field(default_factory=list)

    def add(self, base: Generation, own: Generation, *, first: bool) -> None:
        """Take in a batch decoded by both. Its first token comes from the prefill, timed apart."""
        self.propose_seconds += own.propose_seconds
        self.target_calls += own.target_calls
        self.nodes += own.nodes
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

    @property
    def mean_nodes(self) -> float:
        """Tokens of a verify call, the root included."""
        return self.nodes / max(1, self.target_calls)

    def look_up_cost(self, costs: Costs) -> float:
        """Time of proposing once / time of a one-token target call."""
        return self.propose_seconds / max(1, self.target_calls) / costs.target_call_seconds


def evaluate(target: Backbone, arms: Sequence[Arm], prompts: Sequence[Prompt], config: EvalConfig) -> dict[str, Any]:
    """One row of results per method and temperature, and the first one's sweep of draft lengths."""
    requests = make_requests(target, prompts, config)
    context = int(np.median([len(each.ids) for each in requests])) + config.max_new_tokens // 2
    sweeping = config.sweep if arms[0].sweeps else []
    for arm in arms:
        arm.at(config.draft_length if arm.sweeps else None)
    widest = max(arm.drafter.nodes for arm in arms)
    sizes = sorted({*sweeping, widest - 1, *(n - 1 for n in _SIZES if n < widest)})
    model = next((arm.backbone for arm in arms if arm.backbone is not None), None)
    costs = measure_costs(target, model, sizes, context=context)
    rows = [
        row for temperature in config.temperatures for row in _rows(target, arms, requests, config, temperature, costs)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "rows": rows,
        "left_out": sum(len(prompt.turns) for prompt in prompts) - len(requests),
        "sweep": _sweep(target, arms[0], requests, config, costs) if sweeping else [],
        "costs": {
            "target_call_ms": costs.target_call_seconds * 1e3,
            "c": costs.c,
            "c_v": {str(k): v for k, v in costs.c_v.items()},
            "context": context,
        },
        "settings": config.model_dump(),
        "target": {"name": shown_name(target), "bytes": bytes_of(target.model)},
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


def _rows(
    target: Backbone,
    arms: Sequence[Arm],
    requests: Sequence[Request],
    config: EvalConfig,
    temperature: float,
    costs: Costs,
) -> list[dict[str, Any]]:
    runs = decode(target, [(arm, None) for arm in arms], requests, config, temperature)
    return [_row(target, arm, requests, run, config, temperature, costs) for arm, run in zip(arms, runs, strict=True)]


def _row(
    target: Backbone,
    arm: Arm,
    requests: Sequence[Request],
    run: Run,
    config: EvalConfig,
    temperature: float,
    costs: Costs,
) -> dict[str, Any]:
    found = acceptance(run.counts, seed=config.seed)
    text = degeneracy(run.baseline_texts)
    # an adaptive draft takes as many steps as it drafts tokens, not as many as it may
    steps = max(0.0, min(arm.drafter.draft_steps, run.mean_nodes - 1))
    read = arm.proposal_bytes / bytes_of(target.model) * steps / (arm.drafter.draft_steps or 1)
    steps = steps or 1.0  # looking up once
    c = _step_cost(arm, run, costs, steps)
    c_v = costs.verify(run.mean_nodes)
    predicted = found.tau.value / (c_v + steps * c)
    return {
        "method": arm.name,
        "temperature": temperature,
        "prompts": config.prompts,
        "requests": len(requests),
        "draft_length": arm.drafter.draft_length,
        "draft_steps": steps,
        "nodes": arm.drafter.nodes,
        "mean_nodes": run.mean_nodes,
        "rule": config.rule,
        "verdict": arm.verdict,
        "distance": arm.distance,
        **acceptance_fields(found),
        "mbsu": _or_null(found.tau.value / (1 + read)),
        "c": c,
        "c_v": c_v,
        "predicted_speedup": _or_null(predicted),
        **_speed_fields(run, config.seed),
        "distinct_2": text.distinct_2,
        "loop_share": text.loop_share,
        "flagged": text.flagged,
        "differing_rows": run.differing if temperature == 0 else None,
        "categories": _categories(requests, run, config.seed, arm.verdict),
        "sample": _sample(target, requests, run),
    }


def _step_cost(arm: Arm, run: Run, costs: Costs, steps: float) -> float:
    """Of what is no causal LM, the time of proposing is shared out over its steps."""
    if arm.backbone is not None and costs.c is not None:
        return costs.c
    return run.look_up_cost(costs) / steps


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
    target: Backbone,
    arms: Sequence[tuple[Arm, int | None]],
    requests: Sequence[Request],
    config: EvalConfig,
    temperature: float,
) -> list[Run]:
    """Baseline and every arm (with a draft length of its own) in turn on each batch.

    Acceptance comes from the first of `repeats` rounds: the later ones draw the same numbers again.
    """
    warper = Warper(temperature, config.top_k, config.top_p, config.min_p)
    runs = [Run() for _ in arms]
    _warm_up(target, arms, requests, warper)
    for at in range(0, len(requests), config.batch):
        part = requests[at : at + config.batch]
        common: dict[str, Any] = {
            "warper": warper,
            "max_new_tokens": config.max_new_tokens,
            "eos_ids": target.eos_ids,
            "seed": config.seed,
            "requests": [each.number for each in part],
        }
        ids = [each.ids for each in part]
        for repeat in range(config.repeats):
            base = autoregressive(target, ids, **common)
            for (arm, length), run in zip(arms, runs, strict=True):
                drafter = arm.at(length).drafter
                own = generate(target, drafter, ids, rule=config.rule, **common)
                run.add(base, own, first=repeat == 0)
    return runs


def _warm_up(
    target: Backbone, arms: Sequence[tuple[Arm, int | None]], requests: Sequence[Request], warper: Warper
) -> None:
    ids = [requests[0].ids]
    autoregressive(target, ids, warper=warper, max_new_tokens=8)
    for arm, length in arms:
        generate(target, arm.at(length).drafter, ids, warper=warper, max_new_tokens=8)


def _speed_fields(run: Run, seed: int) -> dict[str, Any]:
    own, base = np.array(run.seconds_R), np.array(run.baseline_seconds_R)
    tokens, base_tokens = np.array(run.tokens_R, float), np.array(run.baseline_tokens_R, float)
    # an answer that ends with its first token has nothing to time
    some = (tokens > 0) & (base_tokens > 0)
    own, base, tokens, base_tokens = own[some], base[some], tokens[some], base_tokens[some]
    # seconds per token of the baseline over seconds per token of ours, resampled by batch
    scaled = base * tokens / np.maximum(base_tokens, 1)
    speedup = ratio(scaled, own, seed=seed)
    return {
        "tokens_per_second": float(tokens.sum() / own.sum()) if own.sum() else None,
        "baseline_tokens_per_second": float(base_tokens.sum() / base.sum()) if base.sum() else None,
        "speedup": speedup.to_list(),
        "prefill_seconds": run.prefill_seconds,
    }


def _categories(requests: Sequence[Request], run: Run, seed: int, verdict: str) -> list[dict[str, Any]]:
    found = []
    for category in sorted({each.prompt.category for each in requests}):
        mine = [count for each, count in zip(requests, run.counts, strict=True) if each.prompt.category == category]
        fields = acceptance_fields(acceptance(mine, seed=seed))
        found.append({"category": category, "requests": len(mine), "verdict": verdict, **fields})
    return found


def _sweep(
    target: Backbone, arm: Arm, requests: Sequence[Request], config: EvalConfig, costs: Costs
) -> list[dict[str, Any]]:
    """Acceptance, cost and speed against the draft length, greedy."""
    some = requests[: config.sweep_prompts]
    runs = decode(target, [(arm, length) for length in config.sweep], some, config, 0.0)
    arm.at(config.draft_length)
    found = []
    for length, run in zip(config.sweep, runs, strict=True):
        measured = acceptance(run.counts, seed=config.seed)
        c = _step_cost(arm, run, costs, length)
        predicted = replace(costs, c=c).predicted_speedup(measured.tau.value, length)
        found.append(
            {
                "draft_length": length,
                "verdict": arm.verdict,
                "tau": measured.tau.to_list(),
                "alpha": measured.alpha.to_list(),
                "c": c,
                "c_v": costs.c_v[length],
                "predicted_speedup": _or_null(predicted),
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
        (tokens, origin) for each in run.generations for tokens, origin in zip(each.tokens, each.origin, strict=True)
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
