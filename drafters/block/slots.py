"""A chain whose tokens do not see each other: each is read off its own slot of one pass.

Slot k has a distribution that does not depend on the tokens drafted before it. Drawn from it, the distributions are
the proposal's q (`IID`); the likeliest of each are a point mass. Both are lossless by the rule that the declared
sampling asks for. Read next: `proposer.py` and `../eagle/parallel.py`, which draft so; `../temperatures.py`, why
later tokens may be drawn cooler.

Shapes: B rows, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...decoding.proposal import DraftSampling, Proposal
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper, draw
from ...decoding.tree.tree import Tree, chain
from ..temperatures import at_depth


def off_slots(
    logits_BKV: Tensor, last_B: Tensor, tree: Tree, warper: Warper, factors: Sequence[float], uniforms: Uniforms | None
) -> Proposal:
    """The proposal of K slots' logits behind `last_B`.

    Args:
        tree: the chain of K tokens.
        factors: as of `at_depth`.
        uniforms: to draw with; None: the likeliest tokens.
    """
    if uniforms is None:
        return chain_of(last_B, logits_BKV.argmax(-1), tree)
    random_BK = uniforms.take(logits_BKV.shape[1])
    q_BKV = torch.stack(
        [at_depth(warper, factors, k)(logits_BV) for k, logits_BV in enumerate(logits_BKV.unbind(1))], 1
    )
    return chain_of(last_B, draw(q_BKV, random_BK), tree, q_BKV)


def chain_of(last_B: Tensor, drafted_BK: Tensor, tree: Tree, q_BKV: Tensor | None = None) -> Proposal:
    """The chain, and what its tokens were drawn from; without it, they are the likeliest ones."""
    tokens_BN = torch.cat((last_B[:, None], drafted_BK), 1)
    if q_BKV is None:
        return Proposal(tokens_BN, tree, DraftSampling.POINT_MASS)
    leaf_B1V = torch.zeros_like(q_BKV[:, :1])  # its row is never read
    return Proposal(tokens_BN, tree, DraftSampling.IID, torch.cat((q_BKV, leaf_B1V), 1))


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
