"""What a server sampled, judged token by token against the target's own distributions; and a control.

The control draws other tokens for the same contexts from the target with noise on its logits, as large as
the server's rounding was measured to be, and is judged by the same tests. If it fails, rounding alone
would fail an honest server, and the tests say nothing at this precision.
Read next: `eval/audit/rosenblatt.py` and `audit/scores.py`, the tests; `audit.py`.

Shapes: M tokens of an answer, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ...decoding.sampling import Warper, draw
from ..audit.audit import failures_of, level_of
from ..audit.rosenblatt import Floats, Judged, Rosenblatt, distributions, judge, transform
from ..audit.scores import Scores, ScoreSums
from .answers import Judgeable

_CHANCE = 1e-9  # that copies of any answer are found where all are draws of their own
_SURE = 1e-4  # that answers of the target are taken for another law's, whatever they share
_ROUNDED_SUM = 1e-4  # of a cumulative sum over a vocabulary in fp32, generously


@dataclass(frozen=True)
class Tested:
    """The tests of one set of tokens."""

    rosenblatt: Rosenblatt
    scores: Scores

    @property
    def failures(self) -> list[str]:
        """Those that fail."""
        return failures_of(None, self.rosenblatt, None, self.scores)

    @property
    def smallest_p(self) -> float:
        """Of all of them."""
        return min(*self.rosenblatt.p_values, self.scores.p_value)


@dataclass(frozen=True)
class SampledJudgement:
    """What came out at T > 0."""

    tested: Tested
    control: Tested
    outside: int
    """Tokens to which the filters leave no probability, further away from it than rounding explains."""
    first_outside: str | None
    nats: float
    """Mean of -log p of the emitted tokens under the target at that temperature, filters apart."""
    expected_nats: float
    """What that is for tokens of the target."""
    copies: int = 0
    """Answers that repeat another one of their prompt where draws of their own would not."""
    log_odds: float = 0.0
    """Of `log_odds_of` the answers, the logarithm of their mean."""

    @property
    def of_another_law(self) -> bool:
        """Whether the target does not write such answers, not even where they share their random numbers.

        The mean of one likelihood ratio an answer is at most 1 in expectation, however answers depend on each other;
        by Markov's inequality it is 10,000 or more at most once in 10,000 audits.
        """
        return self.log_odds >= -math.log(_SURE)


@torch.inference_mode()
def judge_sampled(
    target: Backbone, answers: Sequence[Judgeable], warper: Warper, *, sigma: float, largest: float, seed: int
) -> SampledJudgement:
    """Test the sampled answers of a server.

    Args:
        sigma, largest: the rounding of its logits, root mean square and at most.
    """
    own, control = _Sums(target.vocabulary, seed), _Sums(target.vocabulary, seed + 1)
    generator = torch.Generator(target.device).manual_seed(seed)
    noted = _Noted()
    prompts, written = [each.prompt for each in answers], [each.tokens for each in answers]
    numbers: dict[tuple[int, ...], int] = {}
    for each in distributions(target, None, prompts, written, warper, skip=0):
        number = numbers.setdefault(tuple(prompts[each.answer]), len(numbers))
        noted.add(each, warper, largest)
        own.add(each, number)
        noise_MV = torch.randn(each.logits_MV.shape, generator=generator, device=target.device)
        coin_M = torch.rand(len(each.p_MV), generator=generator, device=target.device)
        drawn_M = draw(warper(each.logits_MV.float() + sigma * noise_MV), coin_M)
        control.add(each._replace(emitted_M=drawn_M), number)
    nats, expected = (float(np.mean(np.concatenate(each))) for each in (noted.nats, noted.expected))
    repeated = copies([(tuple(p), tuple(w)) for p, w in zip(prompts, written, strict=True)], noted.log_p)
    odds = float(np.logaddexp.reduce(noted.log_odds)) - math.log(len(noted.log_odds))
    return SampledJudgement(
        own.test(), control.test(), noted.outside, noted.first_outside, nats, expected, repeated, odds
    )


def copies(answers: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], log_p: Mapping[int, float]) -> int:
    """How many answers repeat another one to the same prompt, though such a one has next to no chance.

    Args:
        answers: prompt and answer.
        log_p: of each answer's number, its log-probability.
    """
    asked = Counter(prompt for prompt, _ in answers)
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    found = 0
    for number, each in enumerate(answers):
        again = first.setdefault(each, number) != number
        # one of all the others is the same with at most this chance
        found += again and math.log(asked[each[0]]) + log_p.get(number, 0.0) < math.log(_CHANCE / len(answers))
    return found


def log_odds_of(p_MV: Tensor, emitted_M: Tensor) -> list[float]:
    """log of the tokens' probability under a flatter law, and under a sharper one, over that under p: p^(1/2) and
    p^(3/2), normalised. A token that p rules out, which is judged apart, says nothing."""
    p_MV = p_MV.double()
    log_p_M, root_MV = p_MV.gather(1, emitted_M[:, None])[:, 0].log(), p_MV.sqrt()
    flat_M = -log_p_M / 2 - root_MV.sum(1).log()
    sharp_M = log_p_M / 2 - (p_MV * root_MV).sum(1).log()
    return [float(ratio_M[log_p_M.isfinite()].sum()) for ratio_M in (flat_M, sharp_M)]


class _Sums:
    """Transforms and scores of one set of tokens."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._transforms: list[Floats] = []
        self._scores = ScoreSums(vocabulary)
        self._rng = np.random.default_rng(seed)

    def add(self, each: Judged, prompt: int) -> None:
        w_M = torch.from_numpy(self._rng.random(len(each.p_MV))).to(each.p_MV.device)
        none_MV = torch.zeros_like(each.p_MV)
        self._transforms.append(transform(each.p_MV, none_MV, each.emitted_M, w_M).cpu().numpy())
        self._scores.add(each.p_MV, None, each.emitted_M, each.front_MY, prompt=prompt)

    def test(self) -> Tested:
        judged = judge(self._transforms, level_of("histogram of the real pair"))
        return Tested(replace(judged, order="p"), self._scores.judge(level_of("contexts of the real pair")))


class _Noted:
    """Surprise of the tokens, and those that the filters would have left out."""

    def __init__(self) -> None:
        self.nats: list[Floats] = []
        self.expected: list[Floats] = []
        self.outside = 0
        self.first_outside: str | None = None
        self.log_p: dict[int, float] = {}
        self.log_odds: list[float] = []

    def add(self, each: Judged, warper: Warper, largest: float) -> None:
        log_p_MV = (each.logits_MV.double() / warper.temperature).log_softmax(-1)
        own_M1 = each.emitted_M[:, None]
        self.log_p[each.answer] = float(each.p_MV.double().gather(1, own_M1).log().sum())
        self.log_odds += log_odds_of(each.p_MV, each.emitted_M)
        self.nats.append(-log_p_MV.gather(1, own_M1)[:, 0].cpu().numpy())
        self.expected.append(-(each.p_MV * log_p_MV).sum(1).cpu().numpy())
        outside_M = ~_nearly_kept(each.logits_MV.float(), warper, largest).gather(1, own_M1)[:, 0]
        self.outside += int(outside_M.sum())
        if self.first_outside is None and outside_M.any():
            at = int(outside_M.int().argmax())
            self.first_outside = (
                f"answer {each.answer}, token {at}: {int(each.emitted_M[at])}, which has "
                f"{float(log_p_MV[at, each.emitted_M[at]].exp()):.3g} without them"
            )


def _nearly_kept(logits_MV: Tensor, warper: Warper, largest: float) -> Tensor:
    """What the filters keep, or would keep of logits that are off by `largest`, bool [M, V].

    Logits that are off in opposite directions change a ratio of probabilities by twice that, and sums of
    many are rounded in fp32 too.
    """
    apart = 2 * largest / warper.temperature
    top_p = warper.top_p if warper.top_p == 1 else min(1.0, warper.top_p + float(np.expm1(apart)) + _ROUNDED_SUM)
    loose = Warper(warper.temperature, 0, top_p, warper.min_p * float(np.exp(-apart)))
    kept_MV = loose(logits_MV) > 0 if top_p < 1 or loose.min_p else torch.ones_like(logits_MV, dtype=torch.bool)
    if not warper.top_k:
        return kept_MV
    last_M1 = logits_MV.topk(min(warper.top_k, logits_MV.shape[1]), dim=1).values[:, -1:]
    return kept_MV & (logits_MV >= last_M1 - 2 * largest)
