"""Known bugs, planted on purpose: an audit that cannot see them proves nothing.

Each is a real bug of somebody's released decoder. A plant changes how a draft token is chosen, or
the acceptance rule, and nothing else. Read next: `audit.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decoding.acceptance import Outcome, Rule, accept_chain, residual
from ..decoding.proposal import Proposal
from ..decoding.random import Uniforms
from ..decoding.sampling import Warper, draw

Choose = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Plant:
    """A bug: how draft tokens are chosen, and a maker of the rule for a fresh run."""

    choose: Choose
    make_rule: Callable[[], Rule]
    story: str


def _argmax(law_BV: Tensor, _uniform_B: Tensor) -> Tensor:
    return law_BV.argmax(-1)


def _unwarped_bonus(
    logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms
) -> Outcome:
    right = accept_chain(logits_BNV, proposal, warper, uniforms)
    bonus_B = draw(logits_BNV[:, -1].float().softmax(-1), uniforms.take(1)[:, 0])
    full_B = right.accepted_B == proposal.tree.depth
    return right._replace(extra_B=torch.where(full_B, bonus_B, right.extra_B))


def _fresh_draw(
    logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms
) -> Outcome:
    right = accept_chain(logits_BNV, proposal, warper, uniforms)
    row = right.accepted_B[:, None, None].expand(-1, 1, logits_BNV.shape[-1])
    p_BV = warper(logits_BNV).gather(1, row).squeeze(1)
    return right._replace(extra_B=draw(p_BV, uniforms.take(1)[:, 0]))


def _residual_argmax(
    logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms
) -> Outcome:
    right = accept_chain(logits_BNV, proposal, warper, uniforms)
    assert proposal.q_BNV is not None
    left_BV = residual(warper(logits_BNV), proposal.q_BNV[:, :-1], right.accepted_B)
    full_B = right.accepted_B == proposal.tree.depth
    return right._replace(extra_B=torch.where(full_B, right.extra_B, left_BV.argmax(-1)))


class _Frozen:
    """Hands out the first block of random numbers again and again."""

    def __init__(self, uniforms: Uniforms, memory: dict[int, Tensor]) -> None:
        self._uniforms, self._memory = uniforms, memory

    def take(self, count: int) -> Tensor:
        key = id(self._uniforms)
        if key not in self._memory:
            self._memory[key] = self._uniforms.take(count)
        return self._memory[key]


def _make_reused_coins() -> Rule:
    memory: dict[int, Tensor] = {}
    keep_alive: list[Uniforms] = []

    def rule(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
        keep_alive.append(uniforms)  # an id must not be given to another run's numbers
        frozen = _Frozen(uniforms, memory)
        return accept_chain(logits_BNV, proposal, warper, frozen)  # type: ignore[arg-type]

    return rule


PLANTS = {
    "argmax-draft": Plant(
        _argmax, lambda: accept_chain, "argmax draft tokens, judged as if drawn from softmax q"
    ),
    "unwarped-bonus": Plant(
        draw, lambda: _unwarped_bonus, "the token behind a full chain from the raw softmax"
    ),
    "fresh-draw": Plant(
        draw, lambda: _fresh_draw, "after a rejection a fresh draw from p, not from the residual"
    ),
    "reused-coins": Plant(draw, _make_reused_coins, "the same coins in every step of a sequence"),
    "residual-argmax": Plant(
        draw, lambda: _residual_argmax, "after a rejection the argmax of the residual, not a draw"
    ),
}
