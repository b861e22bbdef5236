"""Every setting of a method, predicted from three of them that are decoded.

A step takes `verify(N) + rest`: the verify call is timed by itself at every size, the rest (drafting,
acceptance, commit, bookkeeping) is what decoding took beyond it, on a line between measured sizes.
A chain of K accepts what the next longer one accepted up to depth K; between trees tau is on a line
over the logarithm of their nodes; draft temperatures follow from the distributions; sizes of a draft
vocabulary are decoded, with the best of these.
Then

    speed-up = tokens per step / seconds per step * seconds per token of plain decoding,

Leviathan et al. 2023, theorem 3.8, with everything measured.

Draft temperatures by depth come from the distributions that a chain of drawn tokens met. A token drawn from q is
accepted with probability sum min(p, q), on average over the draws (Leviathan et al. 2023). A draft at f times its
temperature has q_f proportional to q^(1/f), so the same chain tells what every f would have given at the places where
it was judged; the best f of each depth is taken. A warmer first token changes which texts the second one is judged
behind: that is left out, and measuring the setting has the last word.
Shapes: B rows, N nodes, K drafted tokens, D depths, F factors, V vocabulary.

Read next: `race.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import generate
from ...decoding.proposal import Proposal, Proposer
from ...decoding.random import Uniforms
from ...decoding.rules.acceptance import Outcome, chain_q
from ...decoding.rules.choice import rule_for
from ...decoding.sampling import Warper
from ...drafters.grids import Grid
from ...drafters.temperatures import FACTORS
from ...errors import RequestError
from ..config import EvalConfig
from ..measure.arms import Arm, check_longest
from ..measure.metrics import Counts
from ..measure.requests import Request
from ..measure.rounds import AllRounds, decode
from ..measure.speed import Costs, measure_costs
from .settings import CUT, Contender, DraftSetting, Prediction

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
    def of(size: int, run: AllRounds) -> Measured:
        """What a run has measured."""
        steps = sum(each.steps for each in run.counts)
        if not steps:
            raise RequestError(
                "no step of the prompts for predictions can be counted: their answers end with the first token, or "
                "too close to eval.max_new_tokens; name other --prompts, or longer answers"
            )
        return Measured(
            size=size,
            tau=sum(each.emitted for each in run.counts) / steps,
            tokens_per_step=sum(run.tokens_G) / run.target_calls,
            nodes=run.mean_nodes,
            # neighbours are compared, and by their median: a slow moment of the machine is no setting's
            step_seconds=median(run.step_costs) * sum(run.baseline_seconds_G) / run.baseline_calls,
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
    """Every setting of a method at the bench's temperature, what it is loaded with among them; the best one last,
    with each size of a draft vocabulary that is to be tried.

    Raises:
        RequestError: a draft is so long that `eval.max_new_tokens` may cut every step.
    """
    own: list[Prediction] = []
    if contender.own:
        (measured,) = _decoded(bench, contender, [{}], [1])
        own = [_prediction(DraftSetting(contender, {}), measured, bench.costs)]
    for grid in contender.grids_at(bench.temperature):
        own += _predicted(bench, contender, grid)
    return own + _cut(bench, contender, own)


def _predicted(bench: Bench, contender: Contender, grid: Grid) -> list[Prediction]:
    sizes = sorted({grid.sizes[0], grid.sizes[len(grid.sizes) // 2], grid.sizes[-1]})
    values = [grid.values(size) for size in sizes]
    points = _decoded(bench, contender, values, sizes)
    made = {size: between(points, size, grid.chain, bench.costs) for size in grid.sizes}
    predicted = [
        _prediction(DraftSetting(contender, grid.values(size)), each, bench.costs) for size, each in made.items()
    ]
    if bench.temperature > 0 and grid.drawn:
        predicted += _heated(bench, contender, grid, made)
    return predicted


def _cut(bench: Bench, contender: Contender, whole: Sequence[Prediction]) -> list[Prediction]:
    """The setting that promises most, with fewer tokens that can be drafted."""
    if not contender.cuts:
        return []
    best = max(whole, key=lambda each: each.speedup).setting.values
    values = [{**best, CUT: str(size)} for size in contender.cuts]
    measured = _decoded(bench, contender, values, contender.cuts)
    settings = (DraftSetting(contender, each) for each in values)
    return [_prediction(setting, each, bench.costs) for setting, each in zip(settings, measured, strict=True)]


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
            predicted.append(_prediction(DraftSetting(contender, values), heated(each, heat), bench.costs))
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


def _prediction(setting: DraftSetting, measured: Measured, costs: Costs) -> Prediction:
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


TRIED = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
_FEWEST = 30  # judged tokens of a depth; with fewer its factor is that of the depth above
_MOST = 8  # prompts


@dataclass(frozen=True)
class Heat:
    """The best factor of each depth."""

    factors_D: tuple[float, ...]
    gain_D: np.ndarray
    """By how much the acceptance of a depth grows, given that the depths above were accepted."""

    def up_to(self, size: int) -> tuple[float, ...]:
        """The factors of a chain of that length, without those that repeat the one before at its end."""
        factors = list(self.factors_D[:size])
        while len(factors) > 1 and factors[-1] == factors[-2]:
            factors.pop()
        return () if factors == [1.0] else tuple(factors)


class Overlaps:
    """A rule that decodes as the lossless one does, and adds up sum min(p, q_f) wherever a token is judged."""

    def __init__(self, depth: int) -> None:
        """`depth`: drafted tokens of a step."""
        self.sums_DF = np.zeros((depth, len(TRIED)))
        self.judged_D = np.zeros(depth)

    def __call__(self, logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
        """`decoding.rules.acceptance.Rule`."""
        outcome = rule_for(proposal, warper)(logits_BNV, proposal, warper, uniforms)
        if proposal.q_BNV is None or not proposal.tree.is_chain:
            return outcome
        p_BKV, log_q_BKV = warper(logits_BNV)[:, :-1], chain_q(proposal).log()
        overlap_BKF = torch.stack(
            [torch.minimum(p_BKV, each).sum(-1) for each in _at_temperatures(log_q_BKV, warper)], -1
        )
        judged_BK = outcome.tested_BD
        K = judged_BK.shape[1]  # a chain that was cut may be shorter, and of an absent token there is no q
        self.sums_DF[:K] += overlap_BKF.where(judged_BK[..., None], 0.0).sum(0).double().cpu().numpy()
        self.judged_D[:K] += judged_BK.sum(0).cpu().numpy()
        return outcome

    def best(self) -> Heat:
        """The factor of each depth that is accepted most."""
        own = TRIED.index(1.0)
        best: list[int] = []
        for sums_F, judged in zip(self.sums_DF, self.judged_D, strict=True):
            best.append(int(sums_F.argmax()) if judged >= _FEWEST else (best or [own])[-1])
        depths = np.arange(len(best))
        before_D = np.maximum(self.sums_DF[:, own], 1e-12)
        gain_D = np.where(self.judged_D >= _FEWEST, self.sums_DF[depths, best] / before_D, 1.0)
        return Heat(tuple(TRIED[at] for at in best), gain_D)


def _at_temperatures(log_q_BKV: Tensor, warper: Warper) -> list[Tensor]:
    """q at each factor; with top-p or min-p about so, as what they have left out is not known any more."""
    return [replace(warper, temperature=factor)(log_q_BKV) for factor in TRIED]


def best_temperatures(
    target: Backbone, drafter: Proposer, requests: Sequence[Request], warper: Warper, *, max_new_tokens: int, seed: int
) -> Heat | None:
    """The best factors of a drafter that draws a chain; None where it draws none, as several drafts do in a tree."""
    seen = Overlaps(drafter.draft_length)
    for each in requests[:_MOST]:  # one by one: rows that have ended would be judged too
        generate(
            target,
            drafter,
            [each.ids],
            warper=warper,
            max_new_tokens=max_new_tokens,
            eos_ids=target.eos_ids,
            seed=seed,
            requests=[each.number],
            rule=seen,
            graphs=False,  # the host reads what is seen of each step
        )
    return seen.best() if seen.judged_D.any() else None
