"""Which drafted tokens survive, and what is emitted after them: the lossless rules.

Pure, batched functions without a host synchronisation. Each states for which `DraftSampling` it is
lossless. Read next: `rules/choice.py`, which picks the one that fits; `lossy.py`, for those that
change the output; docs/audit.md, which proves them.

Shapes: B rows, N nodes (root included), K drafted tokens of a chain, D depths, C trials of a node,
V vocabulary. Probabilities are fp32 and already warped, by the same warper for target, draft and
baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..proposal import DraftSampling, Proposal, Trials
from ..random import Uniforms
from ..sampling import Warper, draw
from ..tree.tree import Nodes


class Outcome(NamedTuple):
    """What a step accepted, for every row.

    Attributes:
        accepted_B: int64, drafted tokens that were kept, 0..D.
        path_BD: int64, node kept at each depth; -1 after the accepted ones.
        extra_B: int64, the token after the accepted ones: correction, or bonus after a full path.
        tested_BD: bool, whether a candidate of this depth was put to the test.
        alpha_hat_BD: fp32, probability that the test of this depth succeeds, given the distributions.
    """

    accepted_B: Tensor
    path_BD: Tensor
    extra_B: Tensor
    tested_BD: Tensor
    alpha_hat_BD: Tensor


# (target logits [B, N, V], proposal, warper, random numbers) -> outcome
Rule = Callable[[Tensor, Proposal, Warper, Uniforms], Outcome]


def accept_greedy(logits_BNV: Tensor, proposal: Proposal, _warper: Warper, _uniforms: Uniforms) -> Outcome:
    """Walk down while a child equals the target's argmax; then emit the argmax.

    Lossless at temperature 0 however the tokens were drawn: the emitted tokens are the target's own.
    `alpha_hat` is 0 or 1, as a greedy target's distribution is a point mass.
    """
    return _walk_matching(logits_BNV.argmax(-1), proposal)


def accept_chain(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
    """Accept x_i with probability min(1, p_i(x_i) / q_i(x_i)); then draw one more token.

    Lossless for a chain whose tokens were drawn from q (Leviathan et al. 2023; Chen et al. 2023,
    theorem 1). A rejection emits a draw from norm(max(0, p - q)), a full chain a draw from p.

    Raises:
        ValueError: the proposal is not a chain, or carries no q.
    """
    p_BNV, q_BKV = warper(logits_BNV), chain_q(proposal)
    coins_BN = proposal.take_coins(uniforms)
    kept_BK = chain_ratio_test(p_BNV, q_BKV, proposal, coins_BN)
    accepted_B = kept_BK.cumprod(1, dtype=torch.long).sum(1)
    extra_B = draw(residual(p_BNV, q_BKV, accepted_B), coins_BN[:, 0])
    overlap_BK = torch.minimum(p_BNV[:, :-1], q_BKV).sum(-1)
    return chain_outcome(accepted_B, extra_B, overlap_BK, proposal.present_BN)


def accept_sampled(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
    """Draw y ~ p once at each node; walk down while a child equals it; then emit it.

    Lossless for point masses on any tree (sample-and-match): the emitted tokens are draws of the
    target's own, and which of them were drafted does not change them. A candidate is accepted with
    the target's mass on the children.
    """
    p_BNV = warper(logits_BNV)
    drawn_BN = draw(p_BNV, proposal.take_coins(uniforms))
    return _walk_matching(drawn_BN, proposal, p_BNV)


def accept_tree(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
    """Try the children of a node one after another, each against the residual of p after those before.

    Recursive rejection: child x_j, drawn from Q_j, is kept with probability
    min(1, P_j(x_j) / Q_j(x_j)); after a rejection P_{j+1} = norm(max(0, P_j - Q_j)). Q_j is q for
    independent draws (SpecInfer, Miao et al. 2023), and q without the earlier siblings,
    renormalised, for draws without replacement (EAGLE, Li et al. 2024; Sequoia, Chen et al. 2024).
    Lossless for both: each trial is one exact step on P_j with the distribution that x_j was drawn from.
    """
    if proposal.q_BNV is None:
        raise ValueError("recursive rejection needs the distribution q of every node's children")
    nodes = proposal.tree.on(logits_BNV.device)
    child_BNC = _candidates(nodes.children_BNC, proposal)
    coins_BN = proposal.take_coins(uniforms)
    if logits_BNV.is_cuda and kernels.available():
        return launch_tree(warper(logits_BNV), proposal, child_BNC, coins_BN)
    own_N1 = torch.arange(child_BNC.shape[1], device=child_BNC.device)[:, None]
    trials = Trials(proposal.q_BNV, child_BNC, own_N1.expand_as(child_BNC))
    coins_BNC = coins_BN.gather(1, child_BNC.clamp_min(0).flatten(1)).view(child_BNC.shape)
    without = proposal.sampling is DraftSampling.WITHOUT_REPLACEMENT
    return _descend(warper(logits_BNV), proposal, trials, coins_BNC, coins_BN[:, 0], without=without)


def launch_tree(p_BNV: Tensor, proposal: Proposal, child_BNC: Tensor, coins_BN: Tensor) -> Outcome:
    """`accept_tree` as one kernel launch.

    The kernel does not sum over the tokens that might have been drawn: here `alpha_hat` is whether the
    test succeeded, which has the same expectation and more noise.
    """
    from ..kernels.verify import verify_tree

    assert proposal.q_BNV is not None
    accepted_B, path_BD, extra_B = verify_tree(
        p_BNV,
        proposal.q_BNV,
        proposal.tokens_BN,
        child_BNC,
        coins_BN,
        coins_BN[:, 0],
        depth=proposal.tree.depth,
        without_replacement=proposal.sampling is DraftSampling.WITHOUT_REPLACEMENT,
    )
    # a depth was tested if the node above it was reached and has a candidate
    above_BD = torch.cat([torch.zeros_like(accepted_B)[:, None], path_BD[:, :-1]], 1)
    has_BN = (child_BNC >= 0).any(2)
    tested_BD = (above_BD >= 0) & has_BN.gather(1, above_BD.clamp_min(0))
    return Outcome(accepted_B, path_BD, extra_B, tested_BD, (path_BD >= 0).float())


def accept_several(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
    """Multi-step speculative sampling: as `accept_tree`, every trial with the q of the draft that made it.

    Lossless for merged trees of several drafts (SpecInfer, Miao et al. 2023, section 4.3). A token
    that two drafts drew is tried twice and expanded once.
    """
    if proposal.trials is None:
        raise ValueError("multi-step speculative sampling needs the trials of every node")
    trials = proposal.trials
    child_BNC = _candidates(trials.child_BNC, proposal)
    trials = Trials(trials.q_BXV, child_BNC, trials.q_index_BNC)
    # a node may be tried twice: a coin per trial, not per node
    needed = 1 + child_BNC[0].numel()
    coins_BX = uniforms.take(max(proposal.coins, needed))[:, :needed]
    coins_BNC = coins_BX[:, 1:].view(child_BNC.shape)
    return _descend(warper(logits_BNV), proposal, trials, coins_BNC, coins_BX[:, 0], without=False)


def chain_q(proposal: Proposal) -> Tensor:
    """q of the drafted tokens of a chain, [B, K, V]; zero where a row has no candidate."""
    if not proposal.tree.is_chain or proposal.q_BNV is None:
        raise ValueError("rejection sampling on a chain needs a chain and its q")
    q_BKV = proposal.q_BNV[:, :-1]
    if proposal.present_BN is not None:
        # where there is no candidate, nothing is subtracted from p
        q_BKV = q_BKV * proposal.present_BN[:, 1:, None]
    return q_BKV


def chain_ratio_test(p_BNV: Tensor, q_BKV: Tensor, proposal: Proposal, coins_BN: Tensor) -> Tensor:
    """u q(x) < p(x) for every drafted token, with one fresh coin per node. bool [B, K]."""
    drafted_BK1 = proposal.tokens_BN[:, 1:, None]
    # no division, and strict: a token with p = 0 is never kept; the last node's p speaks of no drafted token
    kept_BK1 = coins_BN[:, 1:, None] * q_BKV.gather(2, drafted_BK1) < p_BNV.gather(2, drafted_BK1)
    kept_BK = kept_BK1[..., 0]
    return kept_BK if proposal.present_BN is None else kept_BK & proposal.present_BN[:, 1:]


def residual(p_BNV: Tensor, q_BKV: Tensor, accepted_B: Tensor) -> Tensor:
    """max(0, p - q) at the first rejection, p itself after a full chain. [B, V], unnormalised."""
    K = q_BKV.shape[1]
    p_BV = row_of(p_BNV, accepted_B)
    if not K:
        return p_BV
    # after the last node nothing was drafted, so nothing is subtracted
    q_BV = row_of(q_BKV, accepted_B.clamp_max(K - 1)) * (accepted_B < K)[:, None]
    return left_over(p_BV, q_BV)


def left_over(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """max(0, p - q), or p where nothing is left. [B, V], unnormalised."""
    left_BV = (p_BV - q_BV).clamp_min(0)
    # p and q equal up to rounding: the rejection was itself rounding, and p is the right distribution
    return torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV)


def row_of(x_BNV: Tensor, node_B: Tensor) -> Tensor:
    """The entries of one node of each row, [B, V]."""
    if len(x_BNV) == 1:  # the same by fewer operations
        return x_BNV[0].index_select(0, node_B)
    return x_BNV.gather(1, node_B[:, None, None].expand(-1, 1, x_BNV.shape[-1])).squeeze(1)


def chain_outcome(
    accepted_B: Tensor, extra_B: Tensor, alpha_hat_BK: Tensor, present_BN: Tensor | None = None
) -> Outcome:
    """An outcome on a chain, where the node of depth d is d."""
    path_XK, tested_XK = _chain_tables(alpha_hat_BK.shape[1], accepted_B.device)
    tested_BK = tested_XK.index_select(0, accepted_B)
    if present_BN is not None:
        tested_BK = tested_BK & present_BN[:, 1:]
    return Outcome(accepted_B, path_XK.index_select(0, accepted_B), extra_B, tested_BK, alpha_hat_BK)


@cache
def _chain_tables(depth: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Node kept and whether a candidate was tested, at each depth of a chain by how many were accepted: [K + 1, K]."""
    depth_K = torch.arange(depth, device=device)
    count_X1 = torch.arange(depth + 1, device=device)[:, None]
    return torch.where(depth_K < count_X1, depth_K + 1, -1), depth_K <= count_X1


def stack_depths(per_depth: list[Tensor], like_B: Tensor) -> Tensor:
    """[B, D] of what each depth gave; [B, 0] where the root is alone."""
    return torch.stack(per_depth, 1) if per_depth else like_B[:, None][:, :0]


def _candidates(child_BNC: Tensor, proposal: Proposal) -> Tensor:
    """Children that may be accepted, per row; -1 elsewhere. int64 [B, N, C]."""
    child_BNC = child_BNC.expand(len(proposal.tokens_BN), -1, -1)
    if proposal.present_BN is None:
        return child_BNC
    B, N, C = child_BNC.shape
    present_BX = proposal.present_BN.gather(1, child_BNC.clamp_min(0).reshape(B, N * C))
    return torch.where(present_BX.view(B, N, C), child_BNC, -1)


def _descend(
    p_BNV: Tensor, proposal: Proposal, trials: Trials, coins_BNC: Tensor, extra_coin_B: Tensor, *, without: bool
) -> Outcome:
    """Walk down, level by level, by the trials of the node that each row has reached."""
    at_B = torch.zeros_like(proposal.tokens_BN[:, 0])
    alive_B = torch.ones_like(at_B, dtype=torch.bool)
    P_BV = p_BNV[:, 0]
    path, tested, alpha = [], [], []
    for _ in range(proposal.tree.depth):
        trial = _try_children(P_BV, at_B, proposal.tokens_BN, trials, coins_BNC, without=without)
        tested.append(alive_B & trial.tried_B)
        alpha.append(trial.chance_B)
        alive_B = alive_B & (trial.child_B >= 0)
        at_B = torch.where(alive_B, trial.child_B, at_B)
        path.append(torch.where(alive_B, at_B, -1))
        # a row whose walk has ended keeps the residual of its rejections
        stopped_B = tested[-1] & ~alive_B
        P_BV = torch.where(alive_B[:, None], row_of(p_BNV, at_B), P_BV)
        P_BV = torch.where(stopped_B[:, None], trial.left_BV, P_BV)
        if P_BV.device.type == "cpu" and not bool(alive_B.any()):
            break  # on a CPU reading a value is free, and walking on is not
    missing = proposal.tree.depth - len(path)
    for rest, nothing in ((path, -1), (tested, False), (alpha, 0.0)) if missing else ():
        rest += [torch.full_like(rest[0], nothing)] * missing
    extra_B = draw(P_BV, extra_coin_B)
    path_BD, tested_BD, alpha_BD = (stack_depths(each, extra_B) for each in (path, tested, alpha))
    return Outcome((path_BD >= 0).sum(1), path_BD, extra_B, tested_BD.bool(), alpha_BD.float())


class _Trial(NamedTuple):
    """The outcome of trying the children of one node per row."""

    child_B: Tensor  # the one accepted, -1 if none was
    left_BV: Tensor  # the residual of P if none was
    tried_B: Tensor  # whether the node has children
    chance_B: Tensor  # of accepting any of them


def _try_children(
    P_BV: Tensor, at_B: Tensor, tokens_BN: Tensor, trials: Trials, coins_BNC: Tensor, *, without: bool
) -> _Trial:
    child_BC, q_index_BC = row_of(trials.child_BNC, at_B), row_of(trials.q_index_BNC, at_B)
    coins_BC = row_of(coins_BNC, at_B)
    accepted_B = torch.full_like(at_B, -1)
    missed_B = torch.ones_like(P_BV[:, 0])  # chance that all trials so far fail
    overlap_B = missed_B
    first_q_BV = Q_BV = row_of(trials.q_BXV, q_index_BC[:, 0])
    for trial in range(child_BC.shape[1]):
        child_B = child_BC[:, trial]
        tried_B = child_B >= 0
        if trial and not without:
            Q_BV = row_of(trials.q_BXV, q_index_BC[:, trial])
        node_B1 = child_B.clamp_min(0)[:, None]
        token_B1 = tokens_BN.gather(1, node_B1)
        p_B, q_B = P_BV.gather(1, token_B1)[:, 0], Q_BV.gather(1, token_B1)[:, 0]
        kept_B = tried_B & (coins_BC[:, trial] * q_B < p_B)
        accepted_B = torch.where((accepted_B < 0) & kept_B, child_B, accepted_B)
        if trial == 0:
            overlap_B = torch.minimum(P_BV, first_q_BV).sum(-1)
        ratio_B = torch.where(tried_B, (p_B / q_B.clamp_min(1e-30)).clamp_max(1), 0)
        missed_B = missed_B * (1 - ratio_B)
        # the next trial is against the residual of this one; it only counts if this one failed
        left_BV = _normalised(left_over(P_BV, Q_BV))
        P_BV = torch.where(tried_B[:, None], left_BV, P_BV)
        if without:
            rest_BV = _normalised(Q_BV.scatter(1, token_B1, 0.0))
            Q_BV = torch.where(tried_B[:, None], rest_BV, Q_BV)
    # one trial: its chance over draws and coins; several: over the coins alone
    chance_B = overlap_B if child_BC.shape[1] == 1 else 1 - missed_B
    return _Trial(accepted_B, P_BV, (child_BC >= 0).any(1), chance_B)


def _normalised(x_BV: Tensor) -> Tensor:
    return x_BV / x_BV.sum(-1, keepdim=True).clamp_min(1e-30)


def _walk_matching(wanted_BN: Tensor, proposal: Proposal, p_BNV: Tensor | None = None) -> Outcome:
    """Follow from the root the child that equals the token wanted at its parent, all depths at once."""
    if proposal.tree.is_chain:
        return _walk_chain(wanted_BN, proposal, p_BNV)
    tokens_BN = proposal.tokens_BN
    nodes = proposal.tree.on(tokens_BN.device)
    parents_BN = nodes.parents_BN.expand_as(tokens_BN)
    if proposal.present_BN is not None:
        parents_BN = torch.where(proposal.present_BN, parents_BN, -1)
    above_BN = parents_BN.clamp_min(0)
    first_BN = (parents_BN >= 0) & ~_repeated(tokens_BN, parents_BN)
    hit_BN = first_BN & (tokens_BN == wanted_BN.gather(1, above_BN))
    hit_BN[:, 0] = True
    at_BX = _reached(hit_BN, nodes, proposal.tree.depth)
    path_BD = at_BX[:, 1:]
    accepted_B = (path_BD >= 0).sum(1)
    extra_B = wanted_BN.gather(1, at_BX.gather(1, accepted_B[:, None])).squeeze(1)
    # behind the end of the path no node has children: -2 is nobody's parent
    child_BDN = parents_BN[:, None] == torch.where(at_BX < 0, -2, at_BX)[:, :-1, None]
    if p_BNV is None:
        alpha_BD = (path_BD >= 0).float()
    else:
        row_B1 = torch.arange(len(tokens_BN), device=tokens_BN.device)[:, None]
        mass_BN = p_BNV[row_B1, above_BN, tokens_BN] * first_BN  # equal siblings count once
        alpha_BD = (mass_BN[:, None] * child_BDN).sum(2)
    return Outcome(accepted_B, path_BD, extra_B, child_BDN.any(2), alpha_BD)


def _repeated(tokens_BN: Tensor, parents_BN: Tensor) -> Tensor:
    """Whether an earlier child of the same parent carries the same token. bool [B, N]."""
    siblings_BNN = parents_BN[:, :, None] == parents_BN[:, None]
    return (siblings_BNN & (tokens_BN[:, :, None] == tokens_BN[:, None])).tril(-1).any(2)


def _reached(hit_BN: Tensor, nodes: Nodes, depth: int) -> Tensor:
    """The node of each depth that is a hit as all its ancestors are, the root first; -1 after the last.

    int64 [B, 1 + D]. At most one of several siblings is a hit; the root always is.
    """
    kept_BN = (hit_BN[:, None] | ~nodes.ancestors_BNN).all(2)
    # the others are written to a slot that is cut off
    slot_BN = torch.where(kept_BN & (nodes.depths_BN <= depth), nodes.depths_BN, depth + 1)
    node_BN = torch.arange(hit_BN.shape[1], device=hit_BN.device).expand_as(hit_BN)
    return slot_BN.new_full((len(hit_BN), depth + 2), -1).scatter(1, slot_BN, node_BN)[:, :-1]


def _walk_chain(wanted_BN: Tensor, proposal: Proposal, p_BNV: Tensor | None) -> Outcome:
    """The same on a chain, where the node of depth d is d."""
    drafted_BK = proposal.tokens_BN[:, 1:]
    hit_BK = drafted_BK == wanted_BN[:, :-1]
    if proposal.present_BN is not None:
        hit_BK = hit_BK & proposal.present_BN[:, 1:]
    accepted_B = hit_BK.cumprod(1, dtype=torch.long).sum(1)
    extra_B = wanted_BN.gather(1, accepted_B[:, None]).squeeze(1)
    if p_BNV is None:
        alpha_BK = hit_BK.float()
    else:
        alpha_BK = p_BNV.gather(-1, drafted_BK[..., None]).squeeze(-1)  # of a token at the node before it
    return chain_outcome(accepted_B, extra_B, alpha_BK, proposal.present_BN)
