"""Every setting of a method, predicted from three of them that are decoded.

A step takes `verify(N) + rest`: the verify call is timed by itself at every size, the rest (drafting,
acceptance, commit, bookkeeping) is what decoding took beyond it, on a line between measured sizes.
A chain of K accepts what the next longer one accepted up to depth K; between trees tau is on a line
over the logarithm of their nodes; draft temperatures follow from the distributions (`temperatures.py`).
Then

    speed-up = tokens per step / seconds per step * seconds per token of plain decoding,

Leviathan et al. 2023, theorem 3.8, with everything measured. Read next: `race.py`.

Shapes: D depths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...decoding.backbone.backbone import Backbone
from ...decoding.sampling import Warper
from ...drafters.grids import Grid
from ...drafters.temperatures import FACTORS
from ...errors import RequestError
from ..config import EvalConfig
from ..measure.arms import Arm, check_longest
from ..measure.metrics import Counts
from ..measure.requests import Request
from ..measure.rounds import Run, decode
from ..measure.speed import Costs, measure_costs
from .settings import Contender, Prediction, Setting
from .temperatures import Heat, best_temperatures

_VERIFIED = (1, 2, 3, 4, 5, 7, 9, 12, 16, 20, 24, 32, 61)  # drafted nodes of the calls that are timed


@dataclass(frozen=True)
class Measured:
    """One setting as it was decoded."""

    size: int
    tau: float
    tokens_per_step: float
    """Of all rows together: beside tau it knows rows that have ended and steps that were cut."""
    nodes: float
    step_seconds: float
    token_seconds: float
    """Of plain decoding, all rows together."""
    accepted_D: np.ndarray
    """Of the steps that count, the share in which depth d was accepted."""

    @staticmethod
    def of(size: int, run: Run) -> Measured:
        """What a run has measured."""
        calls, steps = run.target_calls, sum(each.steps for each in run.counts)
        if not steps:
            raise RequestError(
                "no step of the prompts for predictions can be counted: their answers end with the first token, or "
                "too close to eval.max_new_tokens; name other --prompts, or longer answers"
            )
        return Measured(
            size=size,
            tau=sum(each.emitted for each in run.counts) / steps,
            tokens_per_step=sum(run.tokens_G) / calls,
            nodes=run.mean_nodes,
            step_seconds=sum(run.seconds_G) / calls,
            token_seconds=sum(run.baseline_seconds_G) / max(1.0, sum(run.baseline_tokens_G)),
            accepted_D=_accepted(run.counts) / steps,
        )


def _accepted(counts: Sequence[Counts]) -> np.ndarray:
    return np.sum([each.passed_D for each in counts], axis=0)


def costs_of(target: Backbone, requests: Sequence[Request], config: EvalConfig) -> Costs:
    """Verify calls of every size, at the batch and behind the context that is decoded."""
    longest = target.context - max(_VERIFIED) - 1
    middle = int(np.median([len(each.ids) for each in requests])) + config.max_new_tokens // 2
    text = [each for request in requests for each in request.ids]
    return measure_costs(target, None, _VERIFIED, context=min(middle, longest), rows=config.batch, text=text)


@dataclass(frozen=True)
class Bench:
    """What every setting is predicted on."""

    target: Backbone
    requests: Sequence[Request]
    config: EvalConfig
    temperature: float
    costs: Costs
    """Of the target's calls, as `costs_of` times them."""


def predict(bench: Bench, contender: Contender) -> list[Prediction]:
    """Every setting of a method at the bench's temperature, what it is loaded with among them.

    Raises:
        RequestError: a draft is so long that `eval.max_new_tokens` may cut every step.
    """
    own = []
    if contender.own:
        (measured,) = _decoded(bench, contender, [{}], [1])
        own = [_prediction(Setting(contender, {}), measured, bench.costs)]
    return own + [
        each for grid in contender.grids_at(bench.temperature) for each in _predicted(bench, contender, grid)
    ]


def _predicted(bench: Bench, contender: Contender, grid: Grid) -> list[Prediction]:
    sizes = sorted({grid.sizes[0], grid.sizes[len(grid.sizes) // 2], grid.sizes[-1]})
    values = [grid.values(size) for size in sizes]
    points = _decoded(bench, contender, values, sizes)
    made = {size: between(points, size, grid.chain, bench.costs) for size in grid.sizes}
    predicted = [_prediction(Setting(contender, grid.values(size)), each, bench.costs) for size, each in made.items()]
    if bench.temperature > 0 and grid.drawn:
        predicted += _heated(bench, contender, grid, made)
    return predicted


def _heated(bench: Bench, contender: Contender, grid: Grid, made: Mapping[int, Measured]) -> list[Prediction]:
    """The chains of a grid at the draft temperatures that are accepted most; none where those are the target's own."""
    longest = contender.load(grid.values(grid.sizes[-1]))
    warper = Warper.of(bench.config, bench.temperature)
    how = {"max_new_tokens": bench.config.max_new_tokens, "seed": bench.config.seed}
    heat = best_temperatures(bench.target, longest, bench.requests, warper, **how)
    predicted = []
    for size, each in made.items():
        factors = heat.up_to(size) if heat else ()
        if heat and factors:
            values = {**grid.values(size), FACTORS: json.dumps(factors)}
            predicted.append(_prediction(Setting(contender, values), heated(each, heat), bench.costs))
    return predicted


def heated(measured: Measured, heat: Heat) -> Measured:
    """A chain as it was measured, its drafted tokens drawn at other temperatures."""
    size = len(measured.accepted_D)
    accepted_D = np.minimum(1, measured.accepted_D * heat.gain_D[:size].cumprod())
    tau = measured.tau + float((accepted_D - measured.accepted_D).sum())
    per_step = measured.tokens_per_step * tau / measured.tau
    return replace(measured, tau=tau, tokens_per_step=per_step, accepted_D=accepted_D)


def _decoded(
    bench: Bench, contender: Contender, values: Sequence[dict[str, str]], sizes: Sequence[int]
) -> list[Measured]:
    """Settings decoded in turn with plain decoding; `sizes` are theirs."""
    arms = [(Arm(contender.title, contender.load(each)), None) for each in values]
    for arm, _ in arms:
        check_longest(arm.name, arm.drafter.draft_length, bench.config.max_new_tokens)
    runs = decode(bench.target, arms, bench.requests, bench.config, bench.temperature)
    return [Measured.of(size, run) for size, run in zip(sizes, runs, strict=True)]


def between(points: Sequence[Measured], size: int, chain: bool, costs: Costs) -> Measured:
    """The setting of some size, from those that were decoded, which are in growing order."""
    sizes = [each.size for each in points]
    if size in sizes:
        return points[sizes.index(size)]

    def line(amounts: Sequence[float]) -> float:
        return float(np.interp(size, sizes, amounts))

    nodes = line([each.nodes for each in points])
    rest = line([each.step_seconds - _verify_seconds(each.nodes, costs) for each in points])
    tau = _tau_of_chain(points, size) if chain else _tau_of_tree(points, size)
    return Measured(
        size=size,
        tau=tau,
        tokens_per_step=tau * line([each.tokens_per_step / each.tau for each in points]),
        nodes=nodes,
        step_seconds=rest + _verify_seconds(nodes, costs),
        token_seconds=line([each.token_seconds for each in points]),
        accepted_D=points[-1].accepted_D[:size],
    )


def _tau_of_chain(points: Sequence[Measured], size: int) -> float:
    """What the next longer chain accepted so far down.

    A longer chain begins at other positions than a shorter one, behind more corrections, where texts
    are harder. What that changes is known at both ends, and lies on a line between them.
    """
    shorter = max((each for each in points if each.size < size), key=lambda each: each.size)
    longer = min((each for each in points if each.size > size), key=lambda each: each.size)

    def of_longer(depth: int) -> float:
        return 1 + float(longer.accepted_D[:depth].sum())

    ends = [shorter.tau / of_longer(shorter.size), longer.tau / of_longer(longer.size)]
    return of_longer(size) * float(np.interp(size, [shorter.size, longer.size], ends))


def _tau_of_tree(points: Sequence[Measured], size: int) -> float:
    sizes = [each.size for each in points]
    return float(np.interp(np.log(size), np.log(sizes), [each.tau for each in points]))


def _verify_seconds(nodes: float, costs: Costs) -> float:
    return costs.target_call_seconds * costs.verify(nodes)


def _prediction(setting: Setting, measured: Measured, costs: Costs) -> Prediction:
    call = costs.target_call_seconds
    rest = measured.step_seconds / call - costs.verify(measured.nodes)
    speedup = measured.tokens_per_step * measured.token_seconds / measured.step_seconds
    return Prediction(setting, measured.tau, measured.nodes, rest, speedup, pays_from(measured, costs))


def pays_from(measured: Measured, costs: Costs) -> float | None:
    """By how much a call would have to grow for a speed-up of 1, the rest of a step staying as it is.

    With g the growth, a step of plain decoding takes g call + around and writes one token a row, and a
    speculative one takes g verify + rest and writes tau.
    """
    call, verify = costs.target_call_seconds, costs.verify(measured.nodes)
    rows = measured.tokens_per_step / measured.tau
    around = measured.token_seconds * rows - call
    rest = measured.step_seconds - call * verify
    gained = call * (measured.tau - verify)
    return max(0.0, (rest - measured.tau * around) / gained) if gained > 0 else None
