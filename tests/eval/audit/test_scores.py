"""Biases that cancel over the contexts are seen, and a right decoder is not accused.

Decoders are simulated: contexts are drawn, p and q are softmaxes, and tokens come out of another
distribution than p. Shapes: M tokens of an answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draftsmith.eval.audit.audit import FALSE_ALARM, SHARES, failures_of
from draftsmith.eval.audit.rosenblatt import Rosenblatt, judge, transform
from draftsmith.eval.audit.scores import FRONT, Scores, ScoreSums
from draftsmith.eval.config import AuditConfig
from torch import Tensor

V, M = 200, AuditConfig().max_new_tokens
GREEDY = SimpleNamespace(bugs=0, near_tie_p=1.0)
LEVEL = FALSE_ALARM * SHARES["contexts of the real pair"]

# (p, q, the token in front, fixed noise by the token in front) -> what the decoder draws from
Decoder = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def simulated(decoder: Decoder, seed: int, *, tokens: int, spread: float = 1.5, words: int = V, drafts: bool = True):
    """Scores and transforms of an audit of that many tokens, and the mean total variation."""
    g = torch.Generator().manual_seed(seed)
    sums, numbers, distance = ScoreSums(words), [], []
    noise_VV = 0.4 * torch.randn(words, words, generator=g)
    for answer in range(-(-tokens // M)):
        logits_MV = spread * torch.randn(M, words, generator=g)
        p_MV, q_MV = logits_MV.softmax(-1), (logits_MV + torch.randn(M, words, generator=g)).softmax(-1)
        front_MY = torch.randint(words, (M, FRONT), generator=g)
        drawn_MV = decoder(p_MV, q_MV, front_MY[:, -1], noise_VV)
        emitted_M = torch.multinomial(drawn_MV, 1, generator=g)[:, 0]
        sums.add(p_MV, q_MV if drafts else None, emitted_M, front_MY, prompt=answer % 24)
        w_M = torch.rand(M, generator=g, dtype=torch.float64)
        numbers.append(transform(p_MV, q_MV, emitted_M, w_M).numpy())
        distance.append(float((drawn_MV - p_MV).abs().sum(1).mean()) / 2)
    return sums.judge(LEVEL), judge(numbers, FALSE_ALARM * 0.25), float(np.mean(distance))


def right(p_MV: Tensor, _q_MV: Tensor, _front_M: Tensor, _noise_VV: Tensor) -> Tensor:
    return p_MV


def leaning(half: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Decoder:
    """Towards q in half of the contexts, away from it in the others."""

    def decoder(p_MV: Tensor, q_MV: Tensor, front_M: Tensor, _noise_VV: Tensor) -> Tensor:
        toward_M1 = half(p_MV, q_MV, front_M)[:, None]
        away_MV = (p_MV - 0.3 * (q_MV - p_MV)).clamp_min(0)
        return torch.where(toward_M1, p_MV + 0.3 * (q_MV - p_MV), away_MV / away_MV.sum(1, keepdim=True))

    return decoder


def entropy(p_MV: Tensor) -> Tensor:
    return torch.special.entr(p_MV).sum(1)


HALVES = {
    "entropy of p": lambda p, q, front: entropy(p) > entropy(p).median(),
    "entropy of q": lambda p, q, front: entropy(q) > entropy(q).median(),
    "likeliest token": lambda p, q, front: p.argmax(1) % 2 == 0,
    "token in front": lambda p, q, front: front % 2 == 0,
    "position": lambda p, q, front: torch.arange(len(p)) % 2 == 0,
}


def failures(scores: Scores | None, judged: Rosenblatt) -> list[str]:
    return failures_of(None, judged, GREEDY, scores)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("half", HALVES)
def test_a_lean_that_cancels_over_the_contexts_is_seen(half: str) -> None:
    scores, judged, distance = simulated(leaning(HALVES[half]), 1, tokens=AuditConfig().tokens // 2)
    assert 0.09 < distance < 0.12
    # half the size of an audit is enough here; the histogram, which adds up all contexts, sees little of it
    assert judged.histogram_p > FALSE_ALARM * 0.25
    assert scores.worst.name.startswith("(p - q) / (p + q)")
    assert "contexts of the real pair" in failures(scores, judged)[0]


def test_a_lean_that_cancels_is_what_the_three_old_tests_let_pass() -> None:
    scores, judged, _ = simulated(leaning(HALVES["entropy of q"]), 1, tokens=AuditConfig().tokens)
    assert failures(None, judged) == []
    assert failures(scores, judged) != []


NOISES: dict[str, Decoder] = {
    "of every token": lambda p, q, front, noise: (p.log() + noise[0]).softmax(-1),
    "of every token behind every other": lambda p, q, front, noise: (p.log() + noise[front]).softmax(-1),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("drafts", [True, False], ids=["draft model", "no draft model"])
def test_fixed_noise_on_the_logits_is_seen(noise: str, drafts: bool) -> None:
    scores, judged, distance = simulated(NOISES[noise], 1, tokens=AuditConfig().tokens, drafts=drafts)
    assert 0.14 < distance < 0.17
    assert failures(None, judged) == []
    assert failures(scores, judged) != []


def test_noise_of_every_context_is_seen_where_p_is_peaked() -> None:
    """Drawn anew for each context it cancels but for second order: tokens lose in proportion to p."""
    g = torch.Generator().manual_seed(7)
    fresh: Decoder = lambda p, q, front, noise: (p.log() + 0.5 * torch.randn(p.shape, generator=g)).softmax(-1)  # noqa: E731
    scores, judged, distance = simulated(fresh, 2, tokens=AuditConfig().tokens, spread=4.0)
    assert 0.12 < distance < 0.16
    assert scores.worst.name.startswith("p, by ")
    assert failures(scores, judged) != []


@pytest.mark.parametrize(("tokens", "runs"), [(1000, 80), pytest.param(6000, 60, marks=pytest.mark.slow)])
def test_a_right_decoder_is_accused_as_rarely_as_promised(tokens: int, runs: int) -> None:
    """Of `runs` audits none fails, and p-values are no smaller than they should be."""
    p_values, worst = [], []
    for seed in range(runs):
        scores, judged, _ = simulated(right, 1000 + seed, tokens=tokens, spread=2.5, words=40)
        assert failures(scores, judged) == []
        p_values += [test.p_value for test in scores.tests]
        worst.append(scores.p_value)
    p_X = np.array(p_values)
    assert np.mean(p_X < 0.05) < 0.055
    assert np.mean(p_X < 0.001) < 0.0025
    # by Bonferroni a run has a smallest p below 0.05 at most once in twenty
    assert np.mean(np.array(worst) < 0.05) < 0.05 + 3 * (0.05 / runs) ** 0.5


def test_shares_of_the_error_rate_add_up() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)
