"""Proof 2: on the real pair, the emitted tokens as draws from the target's own distributions.

With F_t the target's warped distribution at the t-th emitted token, u_t = F_t(y-) + w p_t(y), w uniform, is
independent and uniform for all t if and only if every token was drawn from it (Rosenblatt 1952).
The vocabulary is ordered by p - q, so a bias towards or against the draft moves mass from one end
of [0, 1] to the other, where the histogram sees it. Biases that cancel over the contexts are left to
`scores.py`. Read next: that, and `replay.py`.

Shapes: S tokens of a sequence, V vocabulary, M emitted tokens, Y tokens in front of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ...decoding.sampling import Warper
from ...drafters.model.draft_model import fit_vocabulary
from .scores import FRONT, ScoreSums, detectable_total_variation

BINS = 20
LAGS = 5
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rosenblatt:
    """Three tests of the transforms.

    `detectable` is of the histogram: a bias along the order of the vocabulary, by p - q behind a
    draft model and by p elsewhere, that has the same sign in all contexts.
    """

    tokens: int
    histogram: list[int]
    histogram_statistic: float
    histogram_p: float
    mean: float
    mean_p: float
    serial_statistic: float
    serial_p: float
    detectable: float
    distance: float
    """Total variation of the histogram from the uniform one, beyond what noise explains."""
    order: str = "p - q"
    """What the vocabulary is ordered by: p where there is no draft model to give q."""

    @property
    def p_values(self) -> list[float]:
        return [self.histogram_p, self.mean_p, self.serial_p]


def judge(transforms: Sequence[Floats], level: float) -> Rosenblatt:
    """Test the transforms of many sequences; `level` is the one each single test is held to."""
    u_M = np.concatenate(list(transforms))
    counts, _ = np.histogram(u_M, bins=BINS, range=(0, 1))
    uniformity = stats.chisquare(counts)
    z_mean = (u_M.mean() - 0.5) * (12 * len(u_M)) ** 0.5
    serial = serial_statistic(transforms)
    return Rosenblatt(
        len(u_M),
        counts.tolist(),
        float(uniformity.statistic),
        float(uniformity.pvalue),
        float(u_M.mean()),
        float(2 * stats.norm.sf(abs(z_mean))),
        serial,
        float(stats.chi2.sf(serial, 2 * LAGS)),
        detectable_total_variation(BINS, len(u_M), level),
        _distance(counts),
    )


def _distance(counts: NDArray[np.int64]) -> float:
    share = counts / counts.sum()
    noise = 0.5 * (2 * len(counts) * (1 - 1 / len(counts)) / (np.pi * counts.sum())) ** 0.5
    return max(0.0, float(0.5 * np.abs(share - 1 / len(counts)).sum() - noise))


def serial_statistic(transforms: Sequence[Floats]) -> float:
    """Sum of squared scores of dependence at lags 1..5; chi-square with 10 degrees of freedom.

    Products of centred u see that high follows high; products of cos(2 pi u) see that extremes
    follow extremes. Under independence both have mean 0, known variance and no correlation.
    """
    total = 0.0
    for lag in range(1, LAGS + 1):
        first = np.concatenate([u[:-lag] for u in transforms])
        second = np.concatenate([u[lag:] for u in transforms])
        line = (12**0.5) ** 2 * (first - 0.5) * (second - 0.5)
        wave = 2 * np.cos(2 * np.pi * first) * np.cos(2 * np.pi * second)
        for score in (line, wave):
            total += float(score.sum() ** 2 / max(1, len(score)))
    return total


class Judged(NamedTuple):
    """One answer's emitted tokens beside the distributions that they should come from."""

    answer: int
    p_MV: Tensor
    q_MV: Tensor | None
    emitted_M: Tensor
    front_MY: Tensor
    """The tokens in front of each, -1 where there is none."""
    logits_MV: Tensor
    """The target's, which `p_MV` is made of."""


@torch.inference_mode()
def distributions(
    target: Backbone,
    draft: Backbone | None,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    warper: Warper,
    *,
    skip: int = 1,
) -> Iterator[Judged]:
    """What target and draft say at every emitted token, the first `skip` (from the prefill) left out."""
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if len(answer) <= skip:
            continue
        ids_1S = torch.tensor([[*prompt, *answer]], device=target.device)
        first = len(prompt) - 1 + skip
        logits_MV = target.model(ids_1S, use_cache=False).logits[0, first:-1]
        p_MV = warper(logits_MV)
        q_MV = None
        if draft is not None:
            q_MV = torch.zeros_like(p_MV)  # behind its own context a draft says nothing
            read = ids_1S[:, : draft.context]
            q_logits = draft.model(read, use_cache=False).logits[0, first : len(ids_1S[0]) - 1]
            q_MV[: len(q_logits)] = warper(fit_vocabulary(q_logits, p_MV.shape[-1]))
        front_MY = F.pad(ids_1S[0], (FRONT, 0), value=-1).unfold(0, FRONT, 1)[first + 1 : -1]
        yield Judged(number, p_MV, q_MV, ids_1S[0, first + 1 :], front_MY, logits_MV)


def transforms(
    target: Backbone,
    draft: Backbone | None,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    warper: Warper,
    *,
    seed: int,
    skip: int = 1,
    scores: ScoreSums | None = None,
) -> list[Floats]:
    """u_t of every emitted token of each answer, the first `skip` (from the prefill) left out.

    Without a draft model the vocabulary is ordered by p alone. `scores`: added up on the way, as
    the distributions of all tokens are more than memory holds.
    """
    rng = np.random.default_rng(seed)
    numbers: dict[tuple[int, ...], int] = {}
    transforms = []
    for each in distributions(target, draft, prompts, answers, warper, skip=skip):
        w_M = torch.from_numpy(rng.random(len(each.p_MV))).to(each.p_MV.device)
        q_MV = torch.zeros_like(each.p_MV) if each.q_MV is None else each.q_MV
        transforms.append(transform(each.p_MV, q_MV, each.emitted_M, w_M).cpu().numpy())
        if scores is not None:
            number = numbers.setdefault(tuple(prompts[each.answer]), len(numbers))
            scores.add(each.p_MV, each.q_MV, each.emitted_M, each.front_MY, prompt=number)
    return transforms


def transform(p_MV: Tensor, q_MV: Tensor, emitted_M: Tensor, w_M: Tensor) -> Tensor:
    """The randomised integral transform, vocabulary ordered by p - q (then by id). fp64 [M].

    No sort: the mass in front of the emitted token is a masked sum.
    """
    gain_MV = p_MV - q_MV
    own_M1 = gain_MV.gather(1, emitted_M[:, None])
    ids_V = torch.arange(p_MV.shape[1], device=p_MV.device)
    before_MV = (gain_MV < own_M1) | ((gain_MV == own_M1) & (ids_V < emitted_M[:, None]))
    p_MV = p_MV.double()
    own_p_M = p_MV.gather(1, emitted_M[:, None])[:, 0]
    return ((p_MV * before_MV).sum(1) + w_M * own_p_M) / p_MV.sum(1)
