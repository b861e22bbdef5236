"""What our own decoder does with the same drafter and prompts: text, counts, shares.

Shapes: R requests, T steps, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.sampling import Warper
from numpy.typing import NDArray
from scipy import stats

Prompts = Sequence[Sequence[int]]
# beyond it an engine that does the same as we do is found about once in a thousand comparisons
LEVEL = 0.999


@dataclass(frozen=True)
class Counts:
    """A greedy run: its text, and how often each position was accepted."""

    tokens: list[list[int]]
    steps: int
    accepted: list[int]


def plain(target: Backbone, prompts: Prompts, most_tokens: int) -> list[list[int]]:
    """The target's own greedy text."""
    eos = target.eos_ids
    return autoregressive(target, prompts, warper=Warper(0.0), max_new_tokens=most_tokens, eos_ids=eos).tokens


def greedy(target: Backbone, drafter: Proposer, prompts: Prompts, most_tokens: int) -> Counts:
    """All prompts at T = 0."""
    done = generate(target, drafter, prompts, warper=Warper(0.0), max_new_tokens=most_tokens, eos_ids=target.eos_ids)
    accepted_TB, running_TB = done.steps.accepted_TB, done.steps.running_TB
    accepted = [int(((accepted_TB > depth) & running_TB).sum()) for depth in range(drafter.draft_length)]
    return Counts(done.tokens, int(running_TB.sum()), accepted)


@dataclass(frozen=True)
class Share:
    """The share of steps whose first drafted token is accepted, and its standard error over requests."""

    value: float
    error: float
    requests: int

    def interval(self, requests: int) -> tuple[float, float]:
        """Where the share of as many other requests of the same kind lies, at `LEVEL`.

        Both sides are drawn: the other's error is taken to be ours, by the number of requests.
        """
        z = float(stats.norm.ppf(0.5 + LEVEL / 2))
        width = z * self.error * (1 + self.requests / requests) ** 0.5
        return self.value - width, self.value + width


def first_drafts(target: Backbone, drafter: Proposer, prompts: Prompts, most_tokens: int, *, repeats: int) -> Share:
    """All prompts at T = 1, each of them `repeats` times."""
    tops, bottoms = [], []
    for seed in range(repeats):
        done = generate(
            target, drafter, prompts, warper=Warper(1.0), max_new_tokens=most_tokens, eos_ids=target.eos_ids, seed=seed
        )
        running_TB = done.steps.running_TB
        tops.append(((done.steps.accepted_TB > 0) & running_TB).sum(0))
        bottoms.append(running_TB.sum(0))
    return share(np.concatenate(tops), np.concatenate(bottoms))


def share(top_R: NDArray[np.int64], bottom_R: NDArray[np.int64]) -> Share:
    """sum(top) / sum(bottom); the error of a ratio over requests, by its linear part (Cochran 1977, section 6.3)."""
    value = top_R.sum() / bottom_R.sum()
    rest_R, count = top_R - value * bottom_R, len(top_R)
    error = (count / (count - 1) * (rest_R**2).sum()) ** 0.5 / bottom_R.sum()
    return Share(float(value), float(error), count)
