"""The settings that promise most, measured beside plain decoding until the intervals decide.

Prompts are decoded with plain decoding and each setting in turn, and looked at after 6, 12, 24, ... batches and
at the end. A setting is out once its interval lies below another's (racing: Maron and Moore 1994); measuring
ends when one is left whose interval is clear of 1, or all lie below 1. The intervals hold for all looks and
settings together (Bonferroni), or the best of several would be praised by chance.
Read next: `profile.py`, which predicts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan

from ...decoding.backbone.backbone import Backbone
from ..config import EvalConfig
from ..measure.arms import Arm
from ..measure.metrics import Interval, acceptance
from ..measure.requests import Request
from ..measure.rounds import AllRounds, decode, speed_interval
from .settings import Prediction

FEWEST = 6
"""Batches before an interval decides: a bootstrap of fewer is too narrow."""
_RESAMPLES = 10_000  # the ends of wide intervals are rare among them


@dataclass(frozen=True)
class Raced:
    """A setting as it was measured."""

    prediction: Prediction
    speedup: Interval
    tau: Interval
    requests: int

    @property
    def pays(self) -> bool:
        """Whether it is faster than plain decoding, beyond its interval."""
        return self.speedup.low > 1

    @property
    def predicted_at_tau(self) -> float | None:
        """The prediction, had it known the tau of these prompts: how far it is off then is the costs' share.

        None where no step of them counts.
        """
        tau = self.tau.value
        return None if isnan(tau) else self.prediction.speedup * tau / self.prediction.tau


def race(
    target: Backbone,
    predictions: Sequence[Prediction],
    requests: Sequence[Request],
    config: EvalConfig,
    temperature: float,
) -> list[Raced]:
    """Measure settings, as `best_first` orders them; those that fell behind have fewer requests than the others.

    Args:
        requests: other ones than the predictions were made from, or the best is praised by chance.
    """
    running = {
        at: (Arm(each.setting.label, each.setting.contender.load(each.setting.values)), AllRounds())
        for at, each in enumerate(predictions)
    }
    looks = looks_at(-(-len(requests) // config.batch))
    level = 1 - 0.05 / (len(looks) * len(predictions))
    done: dict[int, Raced] = {}
    for before, batches in zip([0, *looks], looks, strict=False):
        part = requests[before * config.batch : batches * config.batch]
        runs = decode(target, [(arm, None) for arm, _ in running.values()], part, config, temperature)
        for at, run in zip(running, runs, strict=True):
            running[at][1].extend(run)
            done[at] = _raced(predictions[at], running[at][1], config, level)
        running = {at: each for at, each in running.items() if not is_behind(done[at], done.values())}
        if is_decided([done[at] for at in running]):
            break
    return best_first(done.values())


def best_first(done: Iterable[Raced]) -> list[Raced]:
    """The fastest first; but of a drafter's settings that no interval tells apart, prediction and measurement choose.

    They are two estimates of one speed-up, from other prompts: their product is less often led astray by a few
    prompts, or by a moment of a slow machine, than either.
    """
    ranked = sorted(done, key=lambda each: -each.speedup.value)
    for method in dict.fromkeys(each.prediction.setting.contender.name for each in ranked):
        own = [at for at, each in enumerate(ranked) if each.prediction.setting.contender.name == method]
        mine = [ranked[at] for at in own]
        level = [each for each in mine if not is_behind(each, mine)]
        lead = max(level, key=lambda each: each.prediction.speedup * each.speedup.value)
        for at, each in zip(own, [lead, *(other for other in mine if other is not lead)], strict=True):
            ranked[at] = each
    return ranked


def looks_at(batches: int) -> list[int]:
    """After how many batches the intervals are looked at: each time twice as many, and at the end."""
    looks, at = [], FEWEST
    while at < batches:
        looks.append(at)
        at *= 2
    return [*looks, batches]


def _raced(prediction: Prediction, run: AllRounds, config: EvalConfig, level: float) -> Raced:
    tau = acceptance(run.counts, seed=config.seed).tau
    speedup = speed_interval(run, config.seed, level=level, resamples=_RESAMPLES)
    return Raced(prediction, speedup, tau, len(run.counts))


def is_behind(raced: Raced, others: Iterable[Raced]) -> bool:
    """Whether another setting's interval lies above this one's."""
    return any(raced.speedup.high < other.speedup.low for other in others)


def is_decided(left: Sequence[Raced]) -> bool:
    """Whether more prompts could change the answer: one setting is left, and it is clear of 1, or none can pay."""
    if all(each.speedup.high < 1 for each in left):
        return True
    return len(left) == 1 and left[0].pays
