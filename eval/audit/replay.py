"""Proof 3: at temperature 0, every emitted token is the target's own argmax.

What was emitted is replayed through the target one token at a time in fp32. A token that is not
the argmax is a near-tie if its margin is smaller than what separates a one-token forward from a
many-token forward of the same text, measured on the spot; anything else is a bug. And near-ties
must not be more than rounding explains: a decoder that emits the second best wherever two logits are
close, where rounding would exchange few of them, fails by their number.
Read next: `audit.py`.

Shapes: M tokens of all answers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.kv_cache import KVCache
from ...decoding.tree.tree import chain

ROWS = 32
"""Answers that are replayed side by side."""


@dataclass(frozen=True)
class Replay:
    """How the emitted tokens compare with the target's argmax."""

    tokens: int
    argmax: int
    near_ties: int
    explained: float
    """Near-ties that rounding explains, at most: see `explained_near_ties`."""
    near_tie_p: float
    """Chance of so many near-ties or more if rounding made them."""
    bugs: int
    noise: float
    """Largest difference of a logit between a one-token and a many-token forward."""
    smallest_margin: float
    """Smallest gap between the two largest logits over all tokens."""
    margin_histogram: list[tuple[str, int]]
    first_bug: str | None


@torch.inference_mode()
def replay(
    target: Backbone,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    rounding: Sequence[float] = (),
) -> Replay:
    """Replay the answers and class every token.

    Args:
        rounding: by how much logits of whoever wrote the answers were seen to differ from the target's, where
            that is another machine or precision; they count beside what is measured here.
    """
    counts = {"argmax": 0, "near": 0, "bug": 0}
    margins: list[float] = []
    # the distance of two logits that are off independently is off by the root of two as much
    shifts = [2**0.5 * each for each in rounding]
    noise = max(map(abs, rounding), default=0.0)
    first_bug = None
    singles = [
        single
        for at in range(0, len(answers), ROWS)
        for single in token_by_token(target, prompts[at : at + ROWS], answers[at : at + ROWS])
    ]
    for prompt, answer, single in zip(prompts, answers, singles, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=target.device)
        many = target.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        noise = max(noise, float((many - single).abs().max()))
        best = single.topk(2, dim=-1).indices
        shifts += (many - single).gather(1, best).diff(dim=1)[:, 0].tolist()
    for row, (answer, single) in enumerate(zip(answers, singles, strict=True)):
        top = single.topk(2, dim=-1).values
        margins += (top[:, 0] - top[:, 1]).tolist()
        for at, token in enumerate(answer):
            gap = float(top[at, 0] - single[at, token])
            kind = _class(token, int(single[at].argmax()), gap, noise)
            counts[kind] += 1
            if kind == "bug" and first_bug is None:
                first_bug = (
                    f"request {row}, token {at}: emitted {token}, argmax "
                    f"{int(single[at].argmax())}, margin {gap:.3g} against noise {noise:.3g}"
                )
    explained = explained_near_ties(margins, shifts, noise)
    return Replay(
        len(margins),
        counts["argmax"],
        counts["near"],
        explained,
        float(stats.poisson.sf(counts["near"] - 1, explained)),
        counts["bug"],
        noise,
        min(margins, default=float("nan")),
        histogram_of(margins),
        first_bug,
    )


def explained_near_ties(margins_M: Sequence[float], shifts_M: Sequence[float], noise: float) -> float:
    """How many tokens rounding would exchange for the second best, an upper estimate.

    `shifts_M`: by how much the distance of the two largest logits differs between a one-token and
    a many-token forward. A margin m is exchanged if such a shift overcomes it, and never if it is no
    near-tie. Half of the shifts point the other way. The estimate lets every shift be twice as large
    as measured, as the decoder's calls have other shapes than the forward that it was measured on,
    and adds two, larger than any margin, to those measured.
    """
    shift_M = np.sort(np.abs(np.asarray(shifts_M, dtype=np.float64)))
    margin_X = np.asarray([m for m in margins_M if m <= 2 * noise], dtype=np.float64)
    overcome_X = 2 + len(shift_M) - np.searchsorted(2 * shift_M, margin_X, side="left")
    return float((overcome_X / (2 + len(shift_M))).sum()) / 2


def _class(token: int, argmax: int, gap: float, noise: float) -> str:
    if token == argmax:
        return "argmax"
    # either logit may be off by the noise, in opposite directions
    return "near" if gap <= 2 * noise else "bug"


def one_by_one(target: Backbone, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Logits [tokens, V] in front of every emitted token, one token per call."""
    return token_by_token(target, [prompt], [answer])[0]


def token_by_token(
    target: Backbone, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Tensor]:
    """`one_by_one` of several answers, side by side in each call: of every answer the logits [tokens, V]."""
    pairs = list(zip(prompts, answers, strict=True))
    kv_cache = KVCache(len(pairs), max(len(prompt) + len(answer) for prompt, answer in pairs) + 1)
    logits = [target.prefill(prompts, kv_cache)]
    for at in range(max(map(len, answers)) - 1):
        # an answer that has ended says its last token again, in its place
        steps = [min(at, len(answer) - 1) for answer in answers]
        lengths_B = torch.tensor([len(prompt) + step for (prompt, _), step in zip(pairs, steps)], device=target.device)
        tokens_B1 = torch.tensor([[answer[step]] for answer, step in zip(answers, steps)], device=target.device)
        logits.append(target.forward(tokens_B1, lengths_B, chain(0), kv_cache)[:, 0])
    return [torch.stack([each[row] for each in logits[: len(answer)]]).float() for row, answer in enumerate(answers)]


def histogram_of(margins: Sequence[float]) -> list[tuple[str, int]]:
    """How many margins lie between powers of ten."""
    edges = [0.0, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, float("inf")]
    counts = []
    for low, high in zip(edges, edges[1:]):
        counts.append((f"{low:g} to {high:g}", sum(low <= m < high for m in margins)))
    return counts
