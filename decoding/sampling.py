"""The sampling transform of target, draft and baseline alike: temperature, top-k, top-p, min-p.

In this order, in fp32, each filter on what the one before has kept. Ties are kept by value: a token
as likely as the last one kept is kept too, so the result does not depend on how a sort orders equal
logits. Read next: `rules/acceptance.py`; `kernels/warp.py`, the same on a GPU.

Shapes: `...` any leading dimensions, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import kernels

LEAST = 1e-6
"""Of temperatures above 0: over less than that logits leave the range of fp32."""


class Filters(Protocol):
    """What a recipe section says of the distribution beside its temperature."""

    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...

    @property
    def min_p(self) -> float: ...


@dataclass(frozen=True)
class Warper:
    """Turns logits into the distribution that tokens are drawn from.

    `temperature` 0 is greedy: all mass on the largest logit, the lowest id winning ties.
    `top_k` 0, `top_p` 1 and `min_p` 0 switch the respective filter off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LEAST <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; expected 0, or at least {LEAST:g}")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; expected 0 or more")
        if not (0 < self.top_p <= 1 and 0 <= self.min_p < 1):
            raise ValueError(
                f"top_p is {self.top_p} and min_p {self.min_p}; expected top_p above 0 and at most 1, and min_p of at "
                "least 0 and below 1"
            )

    @classmethod
    def of(cls, filters: Filters, temperature: float) -> Warper:
        """With the filters of a recipe section."""
        return cls(temperature, filters.top_k, filters.top_p, filters.min_p)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def __call__(self, logits: Tensor) -> Tensor:
        """Probabilities [..., V], fp32, of logits [..., V] of any float type.

        On CUDA by the kernel of the same definition, elsewhere by `reference`.
        """
        if logits.is_cuda and not self.greedy and kernels.available():
            from .kernels.warp import warp

            return warp(logits, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
        return self.reference(logits)

    def reference(self, logits: Tensor) -> Tensor:
        """The definition, in plain torch."""
        if self.greedy:
            best = logits.argmax(-1)  # the first among equals, by torch's own contract
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best[..., None], 1.0)
        logits = logits.float()
        if self.temperature != 1:
            logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            last_kept = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < last_kept, -torch.inf)
        probs = logits.softmax(dim=-1)
        if self.top_p < 1:
            probs = _renormalised(probs, probs >= _top_p_threshold(probs, self.top_p))
        if self.min_p > 0:
            probs = _renormalised(probs, probs >= self.min_p * probs.amax(-1, keepdim=True))
        return probs


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Index with P(i) = probs[i], by inverting the cumulative sum at `uniform`.

    Args:
        probs: [..., V], fp32, not necessarily normalised, at least one entry positive.
        uniform: [...], in [0, 1).

    Returns:
        int64 [...]; never an entry of probability zero.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    # below the sum of all: the largest double under 1 takes at least half a step off whatever it multiplies
    point = uniform.double()[..., None] * cumulative[..., -1:]
    # the sum first exceeds the point where an entry has mass; without any it is the last entry
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1).clamp_max(probs.shape[-1] - 1)


def _top_p_threshold(probs: Tensor, top_p: float) -> Tensor:
    """Probability of the last token inside the nucleus: the smallest set of mass >= top_p."""
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    inside = (before < top_p).sum(-1, keepdim=True)
    return ordered.gather(-1, inside - 1)


def _renormalised(probs: Tensor, kept: Tensor) -> Tensor:
    probs = probs * kept
    return probs / probs.sum(-1, keepdim=True)
