"""A chain as it is proposed: its tokens, and the distributions that they were drawn from.

Drawn tokens are declared with the proposal's q (`IID`); the likeliest ones are a point mass. Both are lossless by the
rule that the declared sampling asks for. In some drafters the tokens do not see each other: each is read off its own
slot of one pass (`off_slots`), so slot k has a distribution that does not depend on the tokens drafted before it.
Read next: `draft_model.py`, which drafts token by token; `pard.py`, `../block/proposer.py` and
`../eagle/parallel.py`, which draft off slots; `../temperatures.py`, why later tokens may be drawn cooler.

Shapes: B rows, K drafted tokens, N = K + 1 nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...decoding.proposal import DraftSampling, Proposal
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper, draw
from ...decoding.tree.tree import chain
from ..temperatures import at_depth


def chain_of(
    tokens: Sequence[Tensor], q: Sequence[Tensor] = (), *, present_BN: Tensor | None = None, coins: int = 0
) -> Proposal:
    """The chain of some tokens.

    Args:
        tokens: [B] each, the root's first.
        q: [B, V] each, what the drafted ones were drawn from; without it, they are the likeliest ones.
        present_BN, coins: as of `Proposal`.
    """
    tokens_BN, tree = torch.stack([*tokens], 1), chain(len(tokens) - 1)
    if not q:
        return Proposal(tokens_BN, tree, DraftSampling.POINT_MASS, present_BN=present_BN, coins=coins)
    # the last node is a leaf: its row is never read
    q_BNV = torch.stack([*q, torch.zeros_like(q[0])], 1)
    return Proposal(tokens_BN, tree, DraftSampling.IID, q_BNV, present_BN=present_BN, coins=coins)


def off_slots(
    logits_BKV: Tensor,
    last_B: Tensor,
    warper: Warper,
    factors: Sequence[float],
    uniforms: Uniforms | None,
    *,
    coins: int = 0,
) -> Proposal:
    """The chain of K slots' logits behind `last_B`.

    Args:
        factors: as of `at_depth`.
        uniforms: to draw with; None: the likeliest tokens.
        coins: as of `Proposal`.
    """
    if uniforms is None:
        return chain_of([last_B, *logits_BKV.argmax(-1).unbind(1)], coins=coins)
    random_BK = uniforms.take(logits_BKV.shape[1])
    q_BKV = torch.stack(
        [at_depth(warper, factors, k)(logits_BV) for k, logits_BV in enumerate(logits_BKV.unbind(1))], 1
    )
    drawn_BK = draw(q_BKV, random_BK)
    return chain_of([last_B, *drawn_BK.unbind(1)], q_BKV.unbind(1), coins=coins)


def cut_short(proposal: Proposal, sure_BK: Tensor) -> Proposal:
    """A chain without what stands behind the first slot that is in doubt, that slot included.

    Args:
        sure_BK: bool; a slot's must not depend on its own token or on later ones.
    """
    present_BK = sure_BK.long().cumprod(1).bool()
    present_BN = torch.cat((torch.ones_like(present_BK[:, :1]), present_BK), 1)
    nodes = present_BN.shape[1]  # of the coins too: a row's numbers must not depend on its neighbours
    if present_BN.device.type != "cpu":
        return replace(proposal, present_BN=present_BN, coins=nodes)
    # on a CPU reading a value is free, and verifying what no row has is not
    longest = max(1, int(present_BK.sum(1).max()))
    q_BNV = None if proposal.q_BNV is None else proposal.q_BNV[:, : longest + 1]
    tokens_BN, present_BN = proposal.tokens_BN[:, : longest + 1], present_BN[:, : longest + 1]
    return Proposal(tokens_BN, chain(longest), proposal.sampling, q_BNV, present_BN=present_BN, coins=nodes)
