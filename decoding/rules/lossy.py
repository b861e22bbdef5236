"""Acceptance rules that change the output: more tokens per call, no longer the target's own.

They are here for comparison. Each is called lossy in its name, is used only when asked for, and every
number made with it carries its measured distance from the target instead of a verdict.
Read next: `rules/choice.py`; `acceptance.py` for the lossless ones.

Shapes: B rows, N nodes (root included), D depths, K drafted tokens of a chain, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..proposal import Proposal
from ..random import Uniforms
from ..sampling import Warper, draw
from .acceptance import Outcome, chain_outcome, chain_q, chain_ratio_test, residual, stack_depths


def typical_acceptance(
    logits_BNV: Tensor,
    proposal: Proposal,
    warper: Warper,
    _uniforms: Uniforms,
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Outcome:
    """Accept x if p(x) > min(epsilon, delta exp(-H(p))); the longest path is kept (Medusa 2024).

    Entropy H in nats, of the warped p. Among paths of equal length the likeliest wins, and the
    token after it is the argmax.
    """
    p_BNV = warper(logits_BNV)
    entropy_BN = torch.special.entr(p_BNV).sum(-1)
    threshold_BN = (delta * torch.exp(-entropy_BN)).clamp_max(epsilon)
    own_BN, parent_BN = _probability_of_nodes(p_BNV, proposal)
    return _longest(p_BNV, own_BN > threshold_BN.gather(1, parent_BN), own_BN, proposal)


def topk_match(logits_BNV: Tensor, proposal: Proposal, warper: Warper, _uniforms: Uniforms, *, k: int = 2) -> Outcome:
    """Accept a token that is among the target's k likeliest (Stern et al. 2018, section 5.1)."""
    p_BNV = warper(logits_BNV) if not warper.greedy else logits_BNV.float().softmax(-1)
    own_BN, parent_BN = _probability_of_nodes(p_BNV, proposal)
    last_BN = p_BNV.topk(min(k, p_BNV.shape[-1]), dim=-1).values[..., -1]
    # where fewer than k tokens are left, the k-th has probability 0, and is not among them
    passed_BN = (own_BN >= last_BN.gather(1, parent_BN)) & (own_BN > 0)
    return _longest(p_BNV, passed_BN, own_BN, proposal)


def close_match(
    logits_BNV: Tensor, proposal: Proposal, warper: Warper, _uniforms: Uniforms, *, epsilon: int = 2
) -> Outcome:
    """Accept an id at most `epsilon` from the target's likeliest (Stern et al. 2018, section 5.2).

    For vocabularies whose ids lie on a scale, such as grey values; ids of text have no distance.
    """
    p_BNV = warper(logits_BNV)
    own_BN, parent_BN = _probability_of_nodes(p_BNV, proposal)
    apart_BN = proposal.tokens_BN - p_BNV.argmax(-1).gather(1, parent_BN)
    return _longest(p_BNV, apart_BN.abs() <= epsilon, own_BN, proposal)


def minimum_block(
    logits_BNV: Tensor, proposal: Proposal, warper: Warper, _uniforms: Uniforms, *, least: int = 2
) -> Outcome:
    """Match the likeliest token, but emit `least` tokens come what may (Stern et al. 2018, 5.3).

    The token after the accepted ones counts among them, as it does in a block.
    """
    p_BNV = warper(logits_BNV)
    own_BN, parent_BN = _probability_of_nodes(p_BNV, proposal)
    matches_BN = proposal.tokens_BN == p_BNV.argmax(-1).gather(1, parent_BN)
    depths_BN = proposal.tree.on(matches_BN.device).depths_BN
    return _longest(p_BNV, matches_BN | (depths_BN < least), own_BN, proposal)


def lenient_rejection(
    logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms, *, lenience: float = 0.5
) -> Outcome:
    """Chain rejection that accepts if u l q(x) < p(x), l < 1 (Leviathan et al. 2023, A.5)."""
    p_BNV, q_BKV = warper(logits_BNV), chain_q(proposal)
    coins_BN = proposal.take_coins(uniforms)
    kept_BK = chain_ratio_test(p_BNV, lenience * q_BKV, proposal, coins_BN)
    accepted_B = kept_BK.long().cumprod(1).sum(1)
    extra_B = draw(residual(p_BNV, q_BKV, accepted_B), coins_BN[:, 0])
    chance_BK = torch.minimum(p_BNV[:, :-1] / lenience, q_BKV).sum(-1)
    return chain_outcome(accepted_B, extra_B, chance_BK, proposal.present_BN)


def _probability_of_nodes(p_BNV: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """The target's probability of each node at its parent, and that parent. [B, N] each."""
    tokens_BN = proposal.tokens_BN
    parent_BN = proposal.tree.on(tokens_BN.device).parents_BN.clamp_min(0)
    parent_BN = parent_BN.expand(len(tokens_BN), -1)
    flat_B = parent_BN * p_BNV.shape[-1] + tokens_BN
    return p_BNV.flatten(1).gather(1, flat_B), parent_BN


def _longest(p_BNV: Tensor, passed_BN: Tensor, own_BN: Tensor, proposal: Proposal) -> Outcome:
    """The deepest node all of whose ancestors passed, and the argmax after it."""
    nodes = proposal.tree.on(passed_BN.device)
    root_N = torch.arange(passed_BN.shape[1], device=passed_BN.device) == 0
    there_BN = (nodes.parents_BN >= 0).expand_as(passed_BN)
    if proposal.present_BN is not None:
        there_BN = there_BN & proposal.present_BN
    fine_BN = root_N | (passed_BN & there_BN)
    above_BNN = nodes.ancestors_BNN
    # a path is good if no node on it failed; equally deep ones are told apart by likelihood
    reached_BN = ~(above_BNN & ~fine_BN[:, None]).any(2)
    # fp64: a sum of depth and likelihood has to tell close paths apart
    log_BN = torch.where(root_N, 0, own_BN.clamp_min(1e-30).double().log())
    path_log_BN = (above_BNN * log_BN[:, None]).sum(2)
    score_BN = nodes.depths_BN + torch.sigmoid(path_log_BN / 100)
    best_B = torch.where(reached_BN, score_BN, -1.0).argmax(1)
    on_path_BN = _row(above_BNN, best_B) & ~root_N
    path, tested = [], []
    depths_BN = nodes.depths_BN.expand_as(passed_BN)
    at_B1 = torch.zeros_like(best_B)[:, None]
    for depth in range(1, proposal.tree.depth + 1):
        here_BN = on_path_BN & (depths_BN == depth)
        tested.append((there_BN & (nodes.parents_BN == at_B1)).any(1))
        path.append(torch.where(here_BN.any(1), here_BN.to(torch.uint8).argmax(1), -1))
        at_B1 = torch.where(path[-1] >= 0, path[-1], -2)[:, None]
    path_BD, tested_BD = stack_depths(path, best_B), stack_depths(tested, best_B).bool()
    accepted_B = (path_BD >= 0).sum(1)
    extra_B = p_BNV.argmax(-1).gather(1, best_B[:, None])[:, 0]
    return Outcome(accepted_B, path_BD, extra_B, tested_BD, (path_BD >= 0).float())


def _row(mask_BNN: Tensor, node_B: Tensor) -> Tensor:
    index = node_B[:, None, None].expand(-1, 1, mask_BNN.shape[-1])
    return mask_BNN.expand(len(node_B), -1, -1).gather(1, index)[:, 0]
