"""Drafts drawn token by token as decoding draws them, and how likely the target keeps each.

A drawn token x is kept with min(1, p(x) / q(x)) (Leviathan et al. 2023), by the distributions of the temperature that
it was drawn at; so the product along a draft is how often decoding gets there. Read next: `places.py`, the random
numbers; `objective.py`, which learns along the drafts.

Shapes: X places, T = J + 1 tokens of a root and its drafts, C places of a chunk, U tokens that can be drafted, P
drafts, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...decoding.sampling import Warper, draw
from ...drafters.projection import Projection

DraftLogits = Callable[[Tensor, Tensor, int], Tensor]
"""(outputs [C, H], the tokens in front [C], which draft it is) -> fp32 logits [C, U], without a gradient."""


class Drawing:
    """The tokens behind some roots, drawn one after another; each call draws the next of every place."""

    def __init__(
        self,
        logits: DraftLogits,
        warper: Warper,
        root_X: Tensor,
        uniform_XJ: Tensor,
        *,
        ids_U: Tensor | None = None,
        chunk: int,
    ) -> None:
        """`ids_U`: the tokens that can be drafted, None: all; `chunk`: places whose logits are held at once."""
        self._logits, self._warper, self._uniform_XJ = logits, warper, uniform_XJ
        self._ids_U, self._chunk = ids_U, chunk
        self._tokens, self._q = [root_X], [torch.ones_like(root_X, dtype=torch.float32)]

    @torch.no_grad()
    def __call__(self, hidden_XH: Tensor) -> Tensor:
        """The next token of every place, int64 [X], drawn from what the projection makes of `hidden_XH`."""
        j = len(self._tokens) - 1
        before_X, uniform_X = self._tokens[-1], self._uniform_XJ[:, j]
        parts = zip(*(each.split(self._chunk) for each in (hidden_XH, before_X, uniform_X)), strict=True)
        tokens, q = [], []
        with torch.autocast(hidden_XH.device.type, enabled=False):
            for hidden_CH, before_C, uniform_C in parts:
                probs_CU = self._warper(self._logits(hidden_CH, before_C, j))
                drawn_C = draw(probs_CU, uniform_C)
                q.append(probs_CU.gather(1, drawn_C[:, None])[:, 0])
                tokens.append(drawn_C if self._ids_U is None else self._ids_U[drawn_C])
        self._tokens.append(torch.cat(tokens))
        self._q.append(torch.cat(q))
        return self._tokens[-1]

    @property
    def token_XT(self) -> Tensor:
        """int64: a root and its drafts."""
        return torch.stack(self._tokens, 1)

    @property
    def q_XJ(self) -> Tensor:
        """fp32: the probability that each draft was drawn with."""
        return torch.stack(self._q[1:], 1)


class TargetSays(NamedTuple):
    """What the target says of drafts."""

    p_P: Tensor
    """fp32: the probability of each, at the temperature that it was drawn at."""
    best_P: Tensor
    """int64: the target's own likeliest token in its place."""


@torch.no_grad()
def judged(states_PH: Tensor, token_P: Tensor, projection: Projection, warper: Warper, chunk: int) -> TargetSays:
    """What the target says of drafted tokens at its states in front of them, a chunk of logits at a time."""
    p, best = [torch.ones(0, device=states_PH.device)], [token_P[:0]]
    with torch.autocast(states_PH.device.type, enabled=False):
        for states_CH, token_C in zip(states_PH.split(chunk), token_P.split(chunk), strict=True):
            logits_CV = projection.logits(states_CH)
            p.append(warper(logits_CV).gather(1, token_C[:, None])[:, 0])
            best.append(logits_CV.argmax(-1))
    return TargetSays(torch.cat(p), torch.cat(best))


def counted(token_XT: Tensor, eos_ids: Tensor) -> Tensor:
    """bool [X, J]: drafts that no end of a text stands in front of, in the draft or as its root."""
    ended_XT = torch.isin(token_XT, eos_ids)
    return ~ended_XT[:, :-1].long().cumsum(1).bool()
