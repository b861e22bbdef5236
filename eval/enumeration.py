"""Proof 1: on a tiny vocabulary, the law of whole emitted sequences against the exact one.

The very rule that the engine calls steps many sequences at once through a target and a draft that
are random tables. All laws are known in closed form, so the count of every possible sequence of
four tokens has an exact expectation. Several speculative steps make up a sequence: numbers reused
from step to step, or a wrong token between steps, show in the joint law alone.
Read next: `power.py`, `rosenblatt.py`.

Shapes: B sequences, K drafted tokens, V vocabulary, L tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from ..decoding.acceptance import Rule
from ..decoding.proposal import Law, Proposal
from ..decoding.random import Uniforms
from ..decoding.sampling import Warper
from ..decoding.tree import chain
from .plants import Choose
from .power import detectable_total_variation

V, K, L = 3, 2, 4
_BLOCK = 100_000


@dataclass(frozen=True)
class Enumeration:
    """Counts of sequences against their exact law."""

    sequences: int
    cells: int
    statistic: float
    p_value: float
    total_variation: float
    """Measured distance, sampling noise included."""
    detectable: float


class _OneStream(Uniforms):
    """One generator for all rows: the tables have no requests to keep apart."""

    def __init__(self, seed: int, rows: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = rows

    def take(self, count: int) -> Tensor:
        return torch.rand(self._rows, count, generator=self._generator, dtype=torch.float64)


def enumerate_rule(
    rule: Rule, choose: Choose, *, sequences: int, warper: Warper, seed: int, level: float
) -> Enumeration:
    """Run `rule` on `sequences` sequences and test the joint counts.

    Args:
        rule: as the engine calls it; a fresh one per call, it may keep state between steps.
        choose: how a draft token is taken from its law.
        level: of the test, for the stated power.
    """
    target_VV, draft_VV = _tables(seed)
    counts = np.zeros(V**L, dtype=np.int64)
    done = 0
    while done < sequences:
        rows = min(_BLOCK, sequences - done)
        uniforms = _OneStream(seed * 1_000_003 + done, rows)
        tokens_BL = _decode(rule, choose, target_VV, draft_VV, warper, uniforms, rows)
        counts += _count(tokens_BL)
        done += rows
    law = _exact_law(warper(target_VV).double().numpy())
    found = stats.chisquare(counts, law * sequences)
    return Enumeration(
        sequences, len(law), float(found.statistic), float(found.pvalue),
        float(0.5 * np.abs(counts / sequences - law).sum()),
        detectable_total_variation(len(law), sequences, level),
    )  # fmt: skip


def _tables(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of the next token given the last one: a target and a draft that resembles it."""
    g = torch.Generator().manual_seed(seed)
    target_VV = 0.8 * torch.randn(V, V, generator=g)
    return target_VV, target_VV + 0.8 * torch.randn(V, V, generator=g)


def _decode(
    rule: Rule, choose: Choose, target_VV: Tensor, draft_VV: Tensor, warper: Warper,
    uniforms: Uniforms, rows: int,
) -> Tensor:  # fmt: skip
    """The first L tokens behind token 0, int64 [B, L], by speculative steps."""
    written_BL = torch.zeros(rows, L + K + 1, dtype=torch.long)
    count_B = torch.zeros(rows, dtype=torch.long)
    last_B = torch.zeros(rows, dtype=torch.long)
    while int(count_B.min()) < L:
        proposal = _propose(choose, warper(draft_VV), last_B, uniforms)
        outcome = rule(target_VV[proposal.tokens_BN], proposal, warper, uniforms)
        tokens_BE = torch.cat([proposal.tokens_BN[:, 1:], outcome.extra_B[:, None]], 1)
        tokens_BE.scatter_(1, outcome.accepted_B[:, None], outcome.extra_B[:, None])
        slots_BE = count_B[:, None] + torch.arange(K + 1)
        written_BL.scatter_(1, slots_BE.clamp_max(L + K), tokens_BE)
        # sequences that are long enough go on writing behind the tokens that are looked at
        count_B = (count_B + outcome.accepted_B + 1).clamp_max(L)
        last_B = outcome.extra_B
    return written_BL[:, :L]


def _propose(choose: Choose, law_VV: Tensor, last_B: Tensor, uniforms: Uniforms) -> Proposal:
    random_BK = uniforms.take(K)
    tokens, laws = [last_B], []
    for k in range(K):
        laws.append(law_VV[tokens[-1]])
        tokens.append(choose(laws[-1], random_BK[:, k]))
    laws.append(torch.zeros_like(laws[0]))
    return Proposal(torch.stack(tokens, 1), chain(K), Law.IID, torch.stack(laws, 1))


def _count(tokens_BL: Tensor) -> NDArray[np.int64]:
    place_L = V ** torch.arange(L - 1, -1, -1)
    return np.bincount((tokens_BL * place_L).sum(1).numpy(), minlength=V**L)


def _exact_law(p_VV: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probability of every sequence of L tokens behind token 0."""
    p_VV = p_VV / p_VV.sum(1, keepdims=True)
    law = p_VV[0]
    for _ in range(L - 1):
        law = (law.reshape(-1, V)[:, :, None] * p_VV[None]).reshape(-1)
    return law / law.sum()
