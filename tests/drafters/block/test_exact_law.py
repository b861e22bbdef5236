"""What a step of a block drafter emits, exactly: every draft, every coin, five tokens, two slots, no sampling noise.

The drafts are those of the real networks over a target of a table: their first step is caught on its way to the rule.
Point masses are exact to 1e-12, as each drawn token has an interval of the coin to itself. Rejection is exact to the
rounding of fp32 (`tests/helpers/exact_step.py`).

Shapes: N nodes, K slots, X contexts, V vocabulary, R rows, one for every tuple of drawn tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from draftsmith.decoding.engine import generate
from draftsmith.decoding.proposal import DraftSampling, Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.rules.acceptance import Outcome, accept_chain, accept_sampled
from draftsmith.decoding.rules.choice import rule_for
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.tree import chain
from draftsmith.drafters.block.trees import TreeShape
from draftsmith.eval.audit.toy_models.nets import dflash, dflash2, dspark
from draftsmith.eval.audit.toy_models.table import tables
from helpers.exact_step import EXACT, Given, World, assert_lossless, distance, every_draw, pick, step_of
from torch import Tensor

V, K = 5, 2
WARPER = Warper(0.7)
TABLE, _ = tables(3, vocabulary=V, device="cpu")
FAMILIES: dict[str, Callable[..., Any]] = {"dflash": dflash, "dflash2": dflash2, "dspark": dspark}
families = pytest.mark.parametrize("family", FAMILIES)


def first_steps(family: str, seeds: range, **settings: Any) -> Iterator[tuple[Tensor, Proposal]]:
    """The logits and the proposal of the first step behind [0, 1] and a token, for every seed."""
    for seed in seeds:
        caught: list[tuple[Tensor, Proposal]] = []

        def rule(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
            caught.append((logits_BNV, proposal))  # noqa: B023
            return rule_for(proposal, warper, None)(logits_BNV, proposal, warper, uniforms)

        generate(
            TABLE.as_backbone(),
            drafter_of(family, **settings),
            [[0, 1]],
            warper=WARPER,
            max_new_tokens=4,
            seed=seed,
            rule=rule,
        )
        yield caught[0]


def drafter_of(family: str, **settings: Any) -> Any:
    return FAMILIES[family](TABLE, **settings)


def logits_of(tokens: Tensor) -> Tensor:
    """What the target says behind each token."""
    return TABLE.logits_VV[tokens]


def p_of(tokens: Tensor) -> Tensor:
    """The target's distribution behind each token, [..., V], fp64: rows in fp32 sum to 1 within 1e-7."""
    p_V = WARPER(logits_of(tokens)).double()
    return p_V / p_V.sum(-1, keepdim=True)


def law_of(proposal: Proposal) -> dict[tuple[int, ...], float]:
    """Probability of every three tokens, by a deterministic proposal: what stopped early goes on by the target's own."""
    tokens_N = proposal.tokens_BN[0]
    p_NV = p_of(tokens_N)
    drawn_RN = torch.tensor(list(itertools.product(range(V), repeat=len(tokens_N))))
    # the middle of each token's interval
    middle_NV = p_NV.cumsum(-1) - p_NV / 2
    nodes_N = torch.arange(len(tokens_N))
    weight_R = p_NV[nodes_N, drawn_RN].prod(-1)
    rows = pick(proposal, torch.zeros(len(drawn_RN), dtype=torch.long))
    logits_RNV = logits_of(rows.tokens_BN)
    found = accept_sampled(logits_RNV, rows, WARPER, Given(middle_NV[nodes_N, drawn_RN]))
    law: dict[tuple[int, ...], float] = {}
    for row, weight in enumerate(weight_R.tolist()):
        path = found.path_BD[row, : found.accepted_B[row]].tolist()
        emitted = (*tokens_N[path].tolist(), int(found.extra_B[row]))
        for string, chance in continued(emitted):
            law[string] = law.get(string, 0.0) + weight * chance
    return law


def continued(emitted: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every string of K + 1 tokens that begins so, and its probability then."""
    if len(emitted) == K + 1:
        yield emitted, 1.0
        return
    p_V = p_of(torch.tensor(emitted[-1]))
    for token, chance in enumerate(p_V.tolist()):
        for string, rest in continued((*emitted, token)):
            yield string, chance * rest


@families
@pytest.mark.parametrize("settings", [{"policy": "argmax"}, {"tree": TreeShape(5, 2)}], ids=["argmax", "tree"])
def test_point_masses_change_nothing(family: str, settings: dict[str, Any]) -> None:
    ((_, proposal),) = first_steps(family, range(1), **settings)
    assert proposal.sampling is DraftSampling.POINT_MASS
    assert len(proposal.tree) > K
    law = law_of(proposal)
    root = int(proposal.tokens_BN[0, 0])
    p_V = p_of(torch.tensor(root)).tolist()
    wanted = {string: p_V[token] * rest for token in range(V) for string, rest in continued((token,))}
    assert max(abs(law.get(string, 0.0) - chance) for string, chance in wanted.items()) < 1e-12
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)


def world_of(family: str, **settings: Any) -> World:
    """The target's and the drafter's distributions behind every path, those of the second slot by what was drawn.

    Behind a token that no seed drew any distribution would do: it is that of no draft.
    """
    first_q: dict[int, Tensor] = {}
    second_q: dict[tuple[int, int], Tensor] = {}
    for _, proposal in first_steps(family, range(80), **settings):
        assert proposal.sampling is DraftSampling.IID
        assert proposal.q_BNV is not None
        root, drawn = proposal.tokens_BN[0, :2].tolist()
        first_q[root], second_q[root, drawn] = proposal.q_BNV[0, 0], proposal.q_BNV[0, 1]
    root = max(first_q, key=lambda each: sum(front == each for front, _ in second_q))
    any_V = torch.full((V,), 1 / V)
    seconds = [second_q.get((root, token), any_V) for token in range(V)]
    tokens_X = [root, *range(V), *(token for _, token in itertools.product(range(V), repeat=K))]
    q_XV = torch.stack([first_q[root], *seconds, *[any_V] * V**K])
    return World(logits_of(torch.tensor(tokens_X)), q_XV[None], WARPER)


@families
@pytest.mark.parametrize("factors", [(), (1.0, 0.3), (0.3, 0.3), (1.0, 0.0)], ids=str)
def test_drafts_that_were_drawn_change_nothing(family: str, factors: tuple[float, ...]) -> None:
    truth = world_of(family, factors=factors)
    assert_lossless(accept_chain, every_draw(truth, chain(K), DraftSampling.IID), truth)


@families
def test_argmax_drafts_that_are_judged_as_drawn_are_seen(family: str) -> None:
    """The planted bug: q is the softmax, and the token was its likeliest."""
    said = world_of(family)
    q_XV = said.q_MXV[0]
    likeliest = torch.nn.functional.one_hot(q_XV.argmax(-1), V).float()
    drafts = every_draw(said._replace(q_MXV=likeliest[None]), chain(K), DraftSampling.IID)
    judged = drafts._replace(proposal=replace(drafts.proposal, q_BNV=q_XV[drafts.context_RN]))
    assert distance(step_of(accept_chain, judged).probs_X, said) > 1e3 * EXACT
