"""Which acceptance rule a proposal gets: the lossless one by how its tokens were drawn, a lossy one by name.

Read next: `acceptance.py`, `lossy.py`.
"""

from __future__ import annotations

from ...errors import RequestError
from ..proposal import DraftSampling, Proposal
from ..sampling import Warper
from .acceptance import Rule, accept_chain, accept_greedy, accept_sampled, accept_several, accept_tree
from .lossy import close_match, lenient_rejection, minimum_block, topk_match, typical_acceptance

LOSSLESS: dict[str, Rule] = {
    "greedy-match": accept_greedy,
    "rejection": accept_chain,
    "sample-and-match": accept_sampled,
    "recursive-rejection": accept_tree,
    "multi-step": accept_several,
}
LOSSY: dict[str, Rule] = {
    "lossy-typical": typical_acceptance,
    "lossy-lenient": lenient_rejection,
    "lossy-topk-match": topk_match,
    "lossy-close-match": close_match,
    "lossy-min-block": minimum_block,
}


def is_lossy(rule: str | None) -> bool:
    """Whether a rule of this name changes the output."""
    return rule in LOSSY


def rule_for(proposal: Proposal, warper: Warper, asked: str | None = None) -> Rule:
    """The lossless rule for a proposal, or the lossy one that is asked for.

    Raises:
        RequestError: `asked` is unknown, is a lossless rule of other proposals, or a lossy rule that
            needs a proposal of another kind.
    """
    if asked is not None and asked in LOSSY:
        return _lossy(proposal, warper, asked)
    name = lossless_name(proposal.sampling, warper, is_chain=proposal.tree.is_chain)
    if asked is not None and asked != name:
        if asked not in LOSSLESS:
            raise RequestError(f"no acceptance rule is called {asked!r}; known: {', '.join([*LOSSLESS, *LOSSY])}")
        raise RequestError(
            f"acceptance rule {asked!r} is not made for a proposal of {proposal.sampling.value} at "
            f"temperature {warper.temperature:g}; the lossless rule is {name!r}"
        )
    return LOSSLESS[name]


def lossless_name(sampling: DraftSampling, warper: Warper, *, is_chain: bool) -> str:
    """Name of the lossless rule for tokens drawn by `sampling`."""
    if warper.greedy:
        return "greedy-match"
    if sampling is DraftSampling.POINT_MASS:
        return "sample-and-match"
    if sampling is DraftSampling.SEVERAL:
        return "multi-step"
    # on a chain both rules do the same, and the chain's needs no walk
    return "rejection" if is_chain else "recursive-rejection"


def _lossy(proposal: Proposal, warper: Warper, name: str) -> Rule:
    if name == "lossy-lenient" and warper.greedy:
        return accept_greedy  # between point masses lenience changes nothing
    chain_of_draws = proposal.tree.is_chain and proposal.q_BNV is not None
    if name == "lossy-lenient" and not chain_of_draws:
        raise RequestError(
            f"acceptance rule {name!r} needs a chain drawn from a draft's distribution; this proposal is "
            f"of {proposal.sampling.value}. Use a draft model with policy `sample` at a temperature > 0"
        )
    return LOSSY[name]
