"""The sampling transform of target, draft and baseline alike: temperature, top-k, top-p, min-p.

The filters run in this order, in fp32, each on what the one before has kept. Ties are kept by value: a token
as likely as the last one kept is kept too, so the result does not depend on how a sort orders equal
logits. It is plain torch on every device: at most one sort, after a top-k of k numbers only, and the host reads no
value. Read next: `rules/acceptance.py`.

Shapes: `...` any leading dimensions, V vocabulary; Y blocks of T weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

LEAST = 1e-6
"""Of temperatures above 0: over less than that logits leave the range of fp32."""

_BLOCK = 128
"""Weights of a block where a sum is inverted in two steps. Most vocabularies are multiples of it."""


class Filters(Protocol):
    """What a recipe section sets beside the temperature."""

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
        """Probabilities [..., V], fp32, of logits [..., V] of any float type. A row with NaN is NaN."""
        if self.greedy:
            best = logits.argmax(-1)  # the first among equals, by torch's own contract
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best[..., None], 1.0)
        logits = logits.float()
        if self.temperature != 1:
            logits = logits / self.temperature
        foremost = None
        if 0 < self.top_k < logits.shape[-1]:
            last_kept, foremost = logits.topk(self.top_k, dim=-1)
            logits = logits.masked_fill(logits < last_kept[..., -1:], -torch.inf)
        probs = logits.softmax(dim=-1)
        if self.top_p < 1:
            # behind the foremost k are only equals of the last of them: the edge is one of their values
            most = probs if foremost is None else probs.gather(-1, foremost)
            probs = _renormalised(probs, probs >= _top_p_threshold(most, self.top_p))
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
    if _scans_slowly(probs):
        blocks = _Blocks.of(probs)
        return blocks.last_begun(uniform.double()[..., None] * blocks.total).squeeze(-1)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    # below the sum of all: the largest double under 1 takes at least half a step off whatever it multiplies
    point = uniform.double()[..., None] * cumulative[..., -1:]
    # the sum first exceeds the point where an entry has mass; without any it is the last entry
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1).clamp_max(probs.shape[-1] - 1)


def _top_p_threshold(probs: Tensor, top_p: float) -> Tensor:
    """Probability of the last token inside the nucleus: the smallest set of mass >= top_p.

    `probs` are those of all tokens, or of the likeliest ones and no others.
    """
    ordered = probs.sort(dim=-1, descending=True).values
    if _scans_slowly(ordered):
        # inside is what less than top_p stands in front of
        last = _Blocks.of(ordered).last_begun(math.nextafter(float(np.float32(top_p)), 0))
    else:
        before = ordered.cumsum(-1) - ordered
        inside = (before < top_p).sum(-1, keepdim=True)
        last = (inside - 1).clamp_min(0)  # of a row with NaN none is inside, and its first value is NaN
    return ordered.gather(-1, last)


def _scans_slowly(weights: Tensor) -> bool:
    """Whether a running sum of each row takes long: CUDA scans each of several rows with one block of threads.

    It takes 0.2 ms for 150,000 weights, by arithmetic: as long as the rest of sampling. Two steps take a fifth of it.
    A single row is scanned by the whole device.
    """
    several = weights.shape[-1] < weights.numel()
    return weights.is_cuda and several and weights.shape[-1] >= 32 * _BLOCK


class _Blocks(NamedTuple):
    """Weights of each row in blocks, for inverting their running sum without writing it: a block, then inside it."""

    weights_YT: Tensor  # [..., Y, T]
    sums_Y: Tensor  # fp64
    ends_Y: Tensor  # fp64, of all up to the end of the block

    @classmethod
    def of(cls, weights: Tensor) -> _Blocks:
        missing = -weights.shape[-1] % _BLOCK
        padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
        weights_YT = padded.unflatten(-1, (-1, _BLOCK))
        sums_Y = weights_YT.sum(-1, dtype=torch.float64)
        return cls(weights_YT, sums_Y, sums_Y.cumsum(-1))

    @property
    def total(self) -> Tensor:
        return self.ends_Y[..., -1:]

    def last_begun(self, point: Tensor | float) -> Tensor:
        """Index [..., 1] of the last weight above 0 with a sum of at most `point` before it; 0 if there is none.

        The sum before the first one is 0. So however sums are rounded, a point of at least 0 finds a weight above 0.
        """
        block, in_front = _last_begun(self.sums_Y, self.ends_Y, point)
        chosen_T = self.weights_YT.take_along_dim(block[..., None], -2).squeeze(-2)
        place, _ = _last_begun(chosen_T, chosen_T.cumsum(-1, dtype=torch.float64), point - in_front)
        return block * _BLOCK + place


def _last_begun(weights: Tensor, ends: Tensor, point: Tensor | float) -> tuple[Tensor, Tensor]:
    """That index among these weights, and the sum before it; `ends` is their running sum."""
    in_front = ends - weights
    begun = (in_front <= point) & (weights > 0)
    # an index times whether it has begun: the largest is the last one
    last = (begun * torch.arange(weights.shape[-1], device=weights.device)).amax(-1, keepdim=True)
    return last, in_front.gather(-1, last)


def _renormalised(probs: Tensor, kept: Tensor) -> Tensor:
    probs = probs * kept
    return probs / probs.sum(-1, keepdim=True)
