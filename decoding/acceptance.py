"""Which drafted tokens survive, and what is emitted after them.

Pure, batched functions without a host synchronisation. Each states for which law of the proposal
it is lossless; `rule_for` picks it and refuses a rule that does not fit.
Read next: `engine.py`, which calls them; docs/audit.md, which proves them.

Shapes: B rows, N nodes (root included), K drafted tokens of a chain, D depths, V vocabulary.
Probabilities are fp32 and already warped, by the same warper for target, draft and baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import RequestError
from .proposal import Law, Proposal
from .random import Uniforms
from .sampling import Warper, draw


class Outcome(NamedTuple):
    """What a step accepted, for every row.

    Attributes:
        accepted_B: int64, drafted tokens that were kept, 0..D.
        path_BD: int64, node kept at each depth; -1 behind the accepted ones.
        extra_B: int64, the token after the accepted ones: correction, or bonus behind a full path.
        tested_BD: bool, whether a candidate of this depth was put to the test.
        alpha_hat_BD: fp32, probability that the test of this depth succeeds, given the laws.
    """

    accepted_B: Tensor
    path_BD: Tensor
    extra_B: Tensor
    tested_BD: Tensor
    alpha_hat_BD: Tensor


# (target logits [B, N, V], proposal, warper, random numbers) -> outcome
Rule = Callable[[Tensor, Proposal, Warper, Uniforms], Outcome]


def accept_greedy(
    logits_BNV: Tensor, proposal: Proposal, _warper: Warper, _uniforms: Uniforms
) -> Outcome:
    """Walk down while a child equals the target's argmax; then emit the argmax.

    Lossless at temperature 0 for every law: the emitted tokens are the target's own, whatever
    was drafted. `alpha_hat` is 0 or 1, as the law of a greedy target is a point mass.
    """
    return _walk_matching(logits_BNV.argmax(-1), proposal)


def accept_chain(
    logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms
) -> Outcome:
    """Accept x_i with probability min(1, p_i(x_i) / q_i(x_i)); then draw one more token.

    Lossless for a chain whose tokens were drawn from q (Leviathan et al. 2023; Chen et al. 2023,
    theorem 1). A rejection emits a draw from norm(max(0, p - q)), a full chain a draw from p.

    Raises:
        ValueError: the proposal is not a chain, or carries no q.
    """
    if not proposal.tree.is_chain or proposal.q_BNV is None:
        raise ValueError("rejection sampling on a chain needs a chain and its q")
    p_BNV, q_BKV = warper(logits_BNV), proposal.q_BNV[:, :-1]
    drafted_BK = proposal.tokens_BN[:, 1:]
    K = drafted_BK.shape[1]
    random_BK1 = uniforms.take(K + 1)  # one fresh coin per node, one for the extra token

    p_BK = p_BNV[:, :K].gather(-1, drafted_BK[..., None]).squeeze(-1)
    q_BK = q_BKV.gather(-1, drafted_BK[..., None]).squeeze(-1)
    # no division, and strict: a token with p = 0 is never kept
    kept_BK = random_BK1[:, :K] * q_BK < p_BK
    accepted_B = kept_BK.long().cumprod(1).sum(1)

    extra_B = draw(residual(p_BNV, q_BKV, accepted_B), random_BK1[:, K])
    overlap_BK = torch.minimum(p_BNV[:, :K], q_BKV).sum(-1)
    return _chain_outcome(accepted_B, extra_B, overlap_BK)


def accept_sampled(
    logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms
) -> Outcome:
    """Draw y ~ p once at each node; walk down while a child equals it; then emit it.

    Lossless for point masses on any tree (sample-and-match): the emitted tokens are draws of the
    target's own, and which of them were foreseen does not change them. The chance to go on is
    the target's mass on the children.
    """
    p_BNV = warper(logits_BNV)
    drawn_BN = draw(p_BNV, uniforms.take(p_BNV.shape[1]))
    return _walk_matching(drawn_BN, proposal, p_BNV)


def residual(p_BNV: Tensor, q_BKV: Tensor, accepted_B: Tensor) -> Tensor:
    """max(0, p - q) at the first rejection, p itself behind a full chain. [B, V], unnormalised."""
    # behind the chain nothing was drafted, so nothing is subtracted
    q_BNV = torch.cat([q_BKV, torch.zeros_like(p_BNV[:, :1])], dim=1)
    row = accepted_B[:, None, None].expand(-1, 1, p_BNV.shape[-1])
    p_BV = p_BNV.gather(1, row).squeeze(1)
    left_BV = (p_BV - q_BNV.gather(1, row).squeeze(1)).clamp_min(0)
    # p and q equal up to rounding: the rejection was itself rounding, and p is the right law
    return torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV)


def _chain_outcome(accepted_B: Tensor, extra_B: Tensor, alpha_hat_BK: Tensor) -> Outcome:
    """An outcome on a chain, where the node of depth d is d."""
    K = alpha_hat_BK.shape[1]
    depth_K = torch.arange(K, device=accepted_B.device)
    kept_BK = depth_K < accepted_B[:, None]
    path_BK = torch.where(kept_BK, depth_K + 1, -1)
    tested_BK = depth_K <= accepted_B[:, None]
    return Outcome(accepted_B, path_BK, extra_B, tested_BK, alpha_hat_BK)


def _walk_matching(wanted_BN: Tensor, proposal: Proposal, p_BNV: Tensor | None = None) -> Outcome:
    """Follow from the root the child that equals the token wanted at its parent."""
    tree, tokens_BN = proposal.tree, proposal.tokens_BN
    if tree.is_chain:
        return _walk_chain(wanted_BN, tokens_BN, p_BNV)
    B = len(tokens_BN)
    at_B = torch.zeros(B, dtype=torch.long, device=tokens_BN.device)
    alive_B = torch.ones(B, dtype=torch.bool, device=tokens_BN.device)
    parent_N = torch.tensor(tree.parents, device=tokens_BN.device)
    path, tested, alpha = [], [], []
    for _ in range(tree.depth):
        child_BN = parent_N == at_B[:, None]
        wanted_B = wanted_BN.gather(1, at_B[:, None])
        hit_BN = child_BN & (tokens_BN == wanted_B)
        tested.append(alive_B & child_BN.any(1))
        alpha.append(_mass_of_children(child_BN, hit_BN, tokens_BN, at_B, p_BNV))
        alive_B = alive_B & hit_BN.any(1)
        at_B = torch.where(alive_B, hit_BN.to(torch.uint8).argmax(1), at_B)
        path.append(torch.where(alive_B, at_B, -1))
    path_BD = torch.stack(path, 1)
    extra_B = wanted_BN.gather(1, at_B[:, None]).squeeze(1)
    return Outcome(
        (path_BD >= 0).sum(1), path_BD, extra_B, torch.stack(tested, 1), torch.stack(alpha, 1)
    )


def _mass_of_children(
    child_BN: Tensor, hit_BN: Tensor, tokens_BN: Tensor, at_B: Tensor, p_BNV: Tensor | None
) -> Tensor:
    """The target's mass on the children of a node; equal siblings count once. [B], fp32."""
    if p_BNV is None:
        return hit_BN.any(1).float()
    p_BV = p_BNV.gather(1, at_B[:, None, None].expand(-1, 1, p_BNV.shape[-1])).squeeze(1)
    # added up rather than set: another node of the tree may carry the same token
    covered_BV = torch.zeros_like(p_BV).scatter_add(1, tokens_BN, child_BN.float())
    return (p_BV * (covered_BV > 0)).sum(-1)


def _walk_chain(wanted_BN: Tensor, tokens_BN: Tensor, p_BNV: Tensor | None) -> Outcome:
    """The same on a chain, without the loop over depths."""
    drafted_BK = tokens_BN[:, 1:]
    hit_BK = drafted_BK == wanted_BN[:, :-1]
    accepted_B = hit_BK.long().cumprod(1).sum(1)
    extra_B = wanted_BN.gather(1, accepted_B[:, None]).squeeze(1)
    if p_BNV is None:
        alpha_BK = hit_BK.float()
    else:
        alpha_BK = p_BNV[:, :-1].gather(-1, drafted_BK[..., None]).squeeze(-1)
    return _chain_outcome(accepted_B, extra_B, alpha_BK)


RULES: dict[str, Rule] = {
    "greedy-match": accept_greedy,
    "rejection": accept_chain,
    "sample-and-match": accept_sampled,
}


def rule_for(proposal: Proposal, warper: Warper, asked: str | None = None) -> Rule:
    """The lossless rule for what was proposed; asking for another one is refused by name.

    Raises:
        RequestError: `asked` is unknown or would not be lossless here, or no rule fits yet.
    """
    if warper.greedy:
        name = "greedy-match"
    elif proposal.law is Law.POINT_MASS:
        name = "sample-and-match"
    elif proposal.law is Law.IID and proposal.tree.is_chain:
        name = "rejection"
    else:
        raise RequestError(
            f"no lossless rule for {proposal.law.value} on a tree of {len(proposal.tree)} nodes; "
            "propose a chain, or choose the nodes without randomness (Law.POINT_MASS)"
        )
    if asked is not None and asked != name:
        raise RequestError(
            f"acceptance rule {asked!r} is not lossless for a proposal of {proposal.law.value} at "
            f"temperature {warper.temperature:g}; the lossless rule is {name!r}"
        )
    return RULES[name]
