"""Proof 2, context by context: scores of the emitted tokens, centred under the target, added up by kind of context.

The histogram of `rosenblatt.py` adds up all contexts, so a bias whose sign changes with the context
cancels there. Here a function g(context, token) is fixed, and its score g(y) - E_p[g] has mean 0 and
variance Var_p[g] given the past if and only if it is right about p: sums of scores are martingales, and
their squares over their known variances are chi-square (central limit theorem for martingales). The
sums are taken apart by kinds of context that depend on the context alone. Which token comes out is
also counted against what p expects, and what earlier answers emitted too often is expected again in
later ones, behind the same text: a function that is learned, from the past alone.
Read next: `rosenblatt.py`, `audit.py`.

Shapes: M emitted tokens of an answer, V vocabulary, J functions, K splits or kinds of context that
excesses are learned in, G groups of a split, C classes of tokens, X answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import optimize, stats
from torch import Tensor

POWER = 0.99


def detectable_total_variation(cells: int, samples: int, level: float) -> float:
    """Smallest total variation that a chi-square test over `cells` catches with power 0.99.

    A deviation d from cell probabilities p has non-centrality n * sum(d^2 / p), and by
    Cauchy-Schwarz sum(d^2 / p) >= (sum |d|)^2 = 4 TV^2, whatever its shape. So any distribution further
    away than sqrt(lambda / 4n) is caught at least that often.
    """
    needed = noncentrality(cells - 1, level)
    return float((needed / (4 * samples)) ** 0.5)


def noncentrality(freedom: int, level: float) -> float:
    """What a chi-square test at `level` sees with power 0.99."""
    critical = stats.chi2.isf(level, freedom)

    def missing(noncentrality: float) -> float:
        return float(stats.ncx2.sf(critical, freedom, noncentrality)) - POWER

    return float(optimize.brentq(missing, 1e-6, 1e4))


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FUNCTIONS = ("log p", "p", "(p - q) / (p + q)")
SPLITS = (
    "all contexts",
    "entropy of p",
    "overlap with q",
    "projections of p",
    "likeliest token",
    "token in front",
    "position",
    "prompt",
)
LEARNED = ("all contexts", "token in front", "three tokens in front", "prompt")
FRONT = 3
# below this p the logarithm is cut off: scores have to be bounded for sums of them to be normal
_FLOOR = 1e-4
_RANGES = np.array([-np.log(_FLOOR), 1.0, 2.0])
_GROUPS, _CLASSES, _COARSE, _KEYS = 16, 256, 64, 4096
_QUANTILES = (0.25, 0.5, 0.75)
# a group counts by itself if its variance is that of this many scores over the whole range of g
_LEAST = 5.0
_CLASSES_NAME = "classes of tokens"
_EXCESS = "excess of earlier answers"


@dataclass(frozen=True)
class ScoreTest:
    """One test: a chi-square statistic, or of learned excesses a normal one."""

    name: str
    statistic: float
    freedom: int
    p_value: float


@dataclass(frozen=True)
class Scores:
    """All of them, and what they are worth together."""

    tokens: int
    tests: list[ScoreTest]
    p_value: float
    """Smallest p times the number of tests (Bonferroni)."""
    detectable: float
    """A shift of g's mean that the weakest test sees with probability 0.99, in standard deviations
    of g given the context, root mean square over its groups; not a total variation."""

    @property
    def worst(self) -> ScoreTest:
        """The test with the smallest p."""
        return min(self.tests, key=lambda test: test.p_value)


class ScoreSums:
    """Adds up the scores of one answer after another; `judge` tests them."""

    def __init__(self, vocabulary: int) -> None:
        """Groups of tokens and projections are drawn before anything is seen."""
        rng = np.random.default_rng(vocabulary)
        self._group_V = rng.integers(_GROUPS, size=vocabulary)
        self._signs_V3 = torch.from_numpy(rng.choice([-1.0, 1.0], size=(vocabulary, 3))).float()
        self._scores: list[Floats] = []  # [J, M] of every answer
        self._variances: list[Floats] = []
        self._kinds: list[Floats] = []  # [K, M]: what the splits are made of
        self._counts = _Counts()
        self._learned = [_Learned(_KEYS if each != LEARNED[0] else 1) for each in LEARNED]

    def add(self, p_MV: Tensor, q_MV: Tensor | None, emitted_M: Tensor, front_MY: Tensor, *, prompt: int) -> None:
        """One answer.

        Args:
            p_MV: the target's warped distributions, fp32.
            q_MV: the draft's; None where there is no draft model.
            front_MY: the `FRONT` tokens in front of each emitted one, the last one last; -1 where there is none.
            prompt: number of the prompt; the same prompt may be asked more than once.
        """
        if not len(p_MV):
            return
        p_MV = p_MV / p_MV.sum(1, keepdim=True)
        scores, variances = zip(*(_score(g_MV, p_MV, emitted_M) for g_MV in _functions(p_MV, q_MV)))
        self._scores.append(np.stack(scores))
        self._variances.append(np.stack(variances))
        front = front_MY.cpu().numpy().astype(np.int64)
        self._kinds.append(self._kinds_of(p_MV, q_MV, front[:, -1], prompt))
        p_MC, own_M = _by_class(p_MV), (emitted_M % _CLASSES).cpu().numpy()
        self._counts.add(p_MC, own_M)
        for learned, key_M in zip(self._learned, _keys(front, prompt), strict=True):
            learned.add(p_MC, own_M, key_M)

    def _kinds_of(self, p_MV: Tensor, q_MV: Tensor | None, front_M: Ints, prompt: int) -> Floats:
        """For every split a number per context, made of the context alone. [K, M]"""
        entropy_M = torch.special.entr(p_MV).sum(1)
        overlap_M = torch.zeros_like(entropy_M) if q_MV is None else torch.minimum(p_MV, q_MV).sum(1)
        positive_M3 = (p_MV @ self._signs_V3.to(p_MV.device) > 0).long()
        octant_M = (positive_M3 * torch.tensor([1, 2, 4], device=p_MV.device)).sum(1)
        at_M = np.arange(len(p_MV))
        answer = len(self._kinds)
        rows = [
            np.zeros(len(at_M)),
            *(each.double().cpu().numpy() for each in (entropy_M, overlap_M, octant_M)),
            self._group_V[p_MV.argmax(1).cpu().numpy()],
            self._group_V[front_M],
            at_M % 2 + 2 * (answer % 2),
            np.full(len(at_M), prompt % 32),
        ]
        return np.stack(rows).astype(np.float64)

    def judge(self, level: float) -> Scores:
        """Test everything that was added; `level` is the one all tests are held to together."""
        tests = [each for each in (self._counts.test(), *self._summed(), *self._foreseen()) if each is not None]
        count, tokens = max(1, len(tests)), sum(each.shape[1] for each in self._scores)
        smallest = min((each.p_value for each in tests), default=1.0)
        freedoms = [each.freedom for each in tests if not each.name.startswith(_EXCESS)]
        needed = noncentrality(max(freedoms, default=1), level / count)
        return Scores(tokens, tests, min(1.0, count * smallest), float((needed / max(1, tokens)) ** 0.5))

    def _summed(self) -> Iterator[ScoreTest | None]:
        if not self._scores:
            return
        scores_JM, variances_JM = np.concatenate(self._scores, 1), np.concatenate(self._variances, 1)
        kinds_KM = np.concatenate(self._kinds, 1)
        # where to cut is known before the first token that is judged, so that contexts are split by the past alone
        first_KX = np.stack([each[:, 0] for each in self._kinds], 1)
        for split, kind_M, first_X in zip(SPLITS, kinds_KM, first_KX, strict=True):
            group_M = _groups(split, kind_M, first_X)
            for name, score_M, variance_M, reach in zip(FUNCTIONS, scores_JM, variances_JM, _RANGES, strict=True):
                yield _test_of_sums(f"{name}, by {split}", score_M, variance_M, group_M, _LEAST * reach**2)

    def _foreseen(self) -> Iterator[ScoreTest | None]:
        for name, learned in zip(LEARNED, self._learned, strict=True):
            yield learned.test(f"{_EXCESS}, by {name}")


def _by_class(p_MV: Tensor) -> Floats:
    """Mass of the tokens whose ids leave the same remainder, fp64 [M, C]."""
    padded_MV = F.pad(p_MV, (0, -p_MV.shape[1] % _CLASSES))
    return padded_MV.view(len(p_MV), -1, _CLASSES).sum(1).double().cpu().numpy()


def _keys(front_MY: Ints, prompt: int) -> list[Ints]:
    """For every kind of context that excesses are learned in a number per context."""
    # a product modulo a prime in place of the ids, which would fall together in runs
    spread_M = (front_MY + 1) @ np.array([40_503, 10_007, 1], dtype=np.int64)
    zeros_M = np.zeros(len(front_MY), dtype=np.int64)
    return [zeros_M, front_MY[:, -1] % _KEYS, spread_M % 1_000_003 % _KEYS, zeros_M + prompt % _KEYS]


def _functions(p_MV: Tensor, q_MV: Tensor | None) -> list[Tensor]:
    """Bounded functions of context and token, [M, V] each.

    log p sees another temperature or a cut tail, p sees noise on the logits (which flattens in the
    mean by p (sum p^2 - p)), the last one a lean towards the draft: it grows with log(p / q).
    """
    lean_MV = torch.zeros_like(p_MV) if q_MV is None else (p_MV - q_MV) / (p_MV + q_MV).clamp_min(1e-30)
    return [p_MV.clamp_min(_FLOOR).log(), p_MV, lean_MV]


def _score(g_MV: Tensor, p_MV: Tensor, emitted_M: Tensor) -> tuple[Floats, Floats]:
    """g(y) - E_p[g] and Var_p[g], fp64 [M]."""
    weighted_MV = p_MV * g_MV
    mean_M = weighted_MV.sum(1).double()
    variance_M = ((weighted_MV * g_MV).sum(1).double() - mean_M**2).clamp_min(0)
    own_M = g_MV.gather(1, emitted_M[:, None])[:, 0].double()
    return (own_M - mean_M).cpu().numpy(), variance_M.cpu().numpy()


def _groups(split: str, kind_M: Floats, first_X: Floats) -> Ints:
    if split in ("entropy of p", "overlap with q"):
        return np.searchsorted(np.quantile(first_X, _QUANTILES), kind_M)
    return kind_M.astype(np.int64)


def _test_of_sums(name: str, score_M: Floats, variance_M: Floats, group_M: Ints, least: float) -> ScoreTest | None:
    """Sum over groups of (sum of scores)^2 / variance; groups that vary too little go together.

    None if all of them together do, or if there is one group where there should be several: that
    sum is tested with all contexts.
    """
    variance_G = np.bincount(group_M, variance_M)
    score_G = np.bincount(group_M, score_M)
    large_G = variance_G >= least
    sums, variances = list(score_G[large_G]), list(variance_G[large_G])
    if variance_G[~large_G].sum() >= least:
        sums.append(score_G[~large_G].sum())
        variances.append(variance_G[~large_G].sum())
    if not sums or (len(sums) == 1 and not name.endswith(SPLITS[0])):
        return None
    statistic = float((np.array(sums) ** 2 / np.array(variances)).sum())
    return ScoreTest(name, statistic, len(sums), float(stats.chi2.sf(statistic, len(sums))))


class _Counts:
    """Counts of emitted classes less their expectation, and the covariance of that."""

    def __init__(self) -> None:
        self._excess_C = np.zeros(_COARSE)
        self._covariance_CC = np.zeros((_COARSE, _COARSE))

    def add(self, p_MC: Floats, own_M: Ints) -> None:
        p_MC = p_MC.reshape(len(p_MC), -1, _COARSE).sum(1)
        self._excess_C += np.bincount(own_M % _COARSE, minlength=_COARSE) - p_MC.sum(0)
        self._covariance_CC += np.diag(p_MC.sum(0)) - p_MC.T @ p_MC

    def test(self) -> ScoreTest | None:
        """Mahalanobis distance from 0, in the directions that vary enough to be normal."""
        variance_C, axes_CC = np.linalg.eigh(self._covariance_CC)
        kept_C = variance_C >= _LEAST
        statistic = float(((axes_CC.T @ self._excess_C)[kept_C] ** 2 / variance_C[kept_C]).sum())
        freedom = int(kept_C.sum())
        return (
            ScoreTest(_CLASSES_NAME, statistic, freedom, float(stats.chi2.sf(statistic, freedom))) if freedom else None
        )


class _Learned:
    """The excess of every class in earlier answers as a function for the next: g(context, class).

    Without a bias its scores are a martingale again; a bias that is the same behind the same
    context lifts their sum. One-sided, as the excess is expected once more and not made good.
    """

    def __init__(self, keys: int) -> None:
        self._excess_KC = np.zeros((keys, _CLASSES))
        self._score = self._variance = self._reach = 0.0

    def add(self, p_MC: Floats, own_M: Ints, key_M: Ints) -> None:
        g_MC = self._excess_KC[key_M]
        mean_M = (p_MC * g_MC).sum(1)
        self._score += float((g_MC[np.arange(len(own_M)), own_M] - mean_M).sum())
        self._variance += float(np.maximum(0, (p_MC * g_MC**2).sum(1) - mean_M**2).sum())
        self._reach = max(self._reach, float(np.ptp(g_MC, axis=1).max()))
        np.add.at(self._excess_KC, (key_M, own_M), 1.0)
        np.add.at(self._excess_KC, key_M, -p_MC)

    def test(self, name: str) -> ScoreTest | None:
        """The sum over its deviation; None where it varies too little to be normal."""
        if self._variance < _LEAST * self._reach**2 or not self._variance:
            return None
        z = self._score / self._variance**0.5
        return ScoreTest(name, z, 1, float(stats.norm.sf(z)))
