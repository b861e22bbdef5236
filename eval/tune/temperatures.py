"""Draft temperatures by depth, from the distributions that a chain of drawn tokens met.

A token drawn from q is accepted with probability sum min(p, q), on average over the draws (Leviathan et al. 2023). A
draft at f times its temperature has q_f proportional to q^(1/f), so the same chain tells what every f would have
given at the places where it was judged; the best f of each depth is taken. A warmer first token changes which texts
the second one is judged behind: that is left out, and measuring the setting has the last word.
Read next: `drafters/temperatures.py`, which drafts by them; `profile.py`.

Shapes: B rows, N nodes, K drafted tokens, D depths, F factors, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from ..measure.requests import Request

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
        overlap_BKF = torch.stack([torch.minimum(p_BKV, each).sum(-1) for each in _heated(log_q_BKV, warper)], -1)
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


def _heated(log_q_BKV: Tensor, warper: Warper) -> list[Tensor]:
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
