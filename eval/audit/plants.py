"""Known bugs, planted on purpose: an audit that cannot see them proves nothing.

Each is a real bug of somebody's released decoder. A plant changes how draft tokens are chosen or
declared, or the acceptance rule, and nothing else. Bugs of trees are planted in the toy
alone, as a draft model drafts chains. Read next: `audit.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ...decoding.proposal import DraftSampling, Proposal, Proposer
from ...decoding.random import Uniforms
from ...decoding.rules.acceptance import Outcome, Rule, accept_chain, chain_q, residual, row_of
from ...decoding.rules.lossy import typical_acceptance
from ...decoding.sampling import Warper, draw
from ...decoding.tree.tree import Tree
from ...drafters.model.draft_model import DraftModel
from .toy_models.table import TableModel
from .toy_models.trees import SampledTree, TopTree

MakeDraft = Callable[..., DraftModel]


@dataclass(frozen=True)
class Plant:
    """A bug.

    Attributes:
        story: what is done wrong.
        make_rule: the rule of a fresh run; None for the engine's own choice.
        draft: the draft model with the bug; None if the bug is no draft model's.
        tree: a tree of tables with the bug, where a chain could not have it.
    """

    story: str
    make_rule: Callable[[], Rule | None] = lambda: None
    draft: MakeDraft | None = DraftModel
    tree: Callable[[TableModel], Proposer] | None = None

    def toy(self, drafts: Sequence[TableModel]) -> Proposer:
        """The bug among tables."""
        if self.tree is not None:
            return self.tree(drafts[0])
        assert self.draft is not None
        return self.draft(drafts[0].as_backbone(), drafts[0].vocabulary, draft_length=2)

    def on_pair(self, drafter: DraftModel) -> DraftModel | None:
        """The same draft model with the bug; None where it takes a tree."""
        if self.draft is None:
            return None
        backbone: Backbone = drafter.backbone
        return self.draft(backbone, drafter.vocabulary, draft_length=drafter.draft_length)


class _ArgmaxDraft(DraftModel):
    def choose(self, probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
        return probs_BV.argmax(-1)


class _RawQ(DraftModel):
    def declare(self, logits_BV: Tensor, probs_BV: Tensor) -> Tensor:
        return logits_BV.float().softmax(-1)


class _UntemperedQ(DraftModel):
    """Declares q at the target's temperature, and draws at another."""

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        self._warper = warper
        return super().propose(last_B, warper, uniforms)

    def declare(self, logits_BV: Tensor, _probs_BV: Tensor) -> Tensor:
        return self._warper(logits_BV)


class _Doubtful(DraftModel):
    """Drops a drafted token if its own probability is small."""

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        made = super().propose(last_B, warper, uniforms)
        if made.q_BNV is None:
            return made
        own_BK = made.q_BNV[:, :-1].gather(2, made.tokens_BN[:, 1:, None])[..., 0]
        kept_BK = (own_BK > 0.35).long().cumprod(1).bool()
        present_BN = torch.cat([torch.ones_like(kept_BK[:, :1]), kept_BK], 1)
        return Proposal(made.tokens_BN, made.tree, made.sampling, made.q_BNV, present_BN, coins=made.coins)


class _SortedSiblings(SampledTree):
    def siblings(self, probs_BV: Tensor, uniform_BC: Tensor) -> tuple[Tensor, Tensor]:
        tokens_BC, present_BC = super().siblings(probs_BV, uniform_BC)
        order_BC = probs_BV.gather(1, tokens_BC).argsort(1, descending=True)
        return tokens_BC.gather(1, order_BC), present_BC.gather(1, order_BC)


class _WithoutReplacementAsIid(SampledTree):
    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        made = super().propose(last_B, warper, uniforms)
        return Proposal(made.tokens_BN, made.tree, DraftSampling.IID, made.q_BNV, made.present_BN)


class _TopAsSampled(SampledTree):
    def siblings(self, probs_BV: Tensor, uniform_BC: Tensor) -> tuple[Tensor, Tensor]:
        tokens_BC = probs_BV.topk(uniform_BC.shape[1], dim=-1).indices
        return tokens_BC, torch.ones_like(tokens_BC, dtype=torch.bool)


def _unwarped_bonus(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
    right = accept_chain(logits_BNV, proposal, warper, uniforms)
    bonus_B = draw(logits_BNV[:, -1].float().softmax(-1), uniforms.take(1)[:, 0])
    full_B = right.accepted_B == proposal.tree.depth
    return right._replace(extra_B=torch.where(full_B, bonus_B, right.extra_B))


def _fresh_draw(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
    right = accept_chain(logits_BNV, proposal, warper, uniforms)
    p_BV = row_of(warper(logits_BNV), right.accepted_B)
    return right._replace(extra_B=draw(p_BV, uniforms.take(1)[:, 0]))


def _residual_argmax(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
    right = accept_chain(logits_BNV, proposal, warper, uniforms)
    assert proposal.q_BNV is not None
    left_BV = residual(warper(logits_BNV), proposal.q_BNV[:, :-1], right.accepted_B)
    full_B = right.accepted_B == proposal.tree.depth
    return right._replace(extra_B=torch.where(full_B, right.extra_B, left_BV.argmax(-1)))


def _ensemble(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
    """Verifies by w p + (1 - w) q."""
    p_BNV = warper(logits_BNV)
    mixed_BNV = p_BNV.clone()
    mixed_BNV[:, :-1] = _WEIGHT * p_BNV[:, :-1] + (1 - _WEIGHT) * chain_q(proposal)
    return accept_chain(mixed_BNV.log(), proposal, Warper(1.0), uniforms)


def _coins_per_path(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
    """Two paths of two nodes with a common first token, each with numbers of its own."""
    p_BNV = warper(logits_BNV)
    tokens_BN = proposal.tokens_BN
    paths = []
    for leaf in (2, 3):  # nodes of `_TWO_PATHS`
        wanted_BN = draw(p_BNV, uniforms.take(p_BNV.shape[1]))
        first_B = wanted_BN[:, 0] == tokens_BN[:, 1]
        second_B = first_B & (wanted_BN[:, 1] == tokens_BN[:, leaf])
        paths.append((first_B.long() + second_B, leaf))
    (left_B, _), (right_B, _) = paths
    accepted_B = torch.maximum(left_B, right_B)
    leaf_B = torch.where(right_B > left_B, 3, 2)
    path_BD = torch.stack([torch.ones_like(leaf_B), leaf_B], 1)
    path_BD = torch.where(torch.arange(2, device=accepted_B.device) < accepted_B[:, None], path_BD, -1)
    at_B = torch.where(accepted_B == 2, leaf_B, accepted_B)
    extra_B = draw(row_of(p_BNV, at_B), uniforms.take(1)[:, 0])
    return Outcome(accepted_B, path_BD, extra_B, path_BD >= 0, (path_BD >= 0).float())


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


_WEIGHT = 0.7  # of the target, as transformers' assistant_ensemble_weight has it
_FORK = Tree((-1, 0, 0, 1, 1, 2, 2))
_TWO_PATHS = Tree((-1, 0, 1, 1))

PLANTS = {
    "argmax-draft": Plant("argmax draft tokens, judged as if drawn from softmax q", draft=_ArgmaxDraft),
    "raw-q": Plant("tokens drawn from the warped q, judged by the raw softmax", draft=_RawQ),
    "untempered-q": Plant(
        "tokens drawn at draft temperatures of their own, judged by q at the target's",
        draft=partial(_UntemperedQ, factors=(0.6, 1.5)),
    ),
    "unwarped-bonus": Plant("the token behind a full chain from the raw softmax", lambda: _unwarped_bonus),
    "fresh-draw": Plant("after a rejection a fresh draw from p, not from the residual", lambda: _fresh_draw),
    "residual-argmax": Plant("after a rejection the argmax of the residual, not a draw", lambda: _residual_argmax),
    "reused-coins": Plant("the same coins in every step of a sequence", _make_reused_coins),
    "dropped-token": Plant("a drawn token left out because its own q is small", draft=_Doubtful),
    "typical-acceptance": Plant("Medusa's typical acceptance", lambda: typical_acceptance),
    "ensemble-weight": Plant("drafts verified by a mixture of target and draft", lambda: _ensemble),
    "coins-per-path": Plant(
        "every path of a tree with coins of its own, then a fresh draw",
        lambda: _coins_per_path,
        None,
        partial(TopTree, tree=_TWO_PATHS),
    ),
    "top-as-sampled": Plant(
        "the likeliest children, judged as if drawn from softmax q",
        draft=None,
        tree=partial(_TopAsSampled, tree=_FORK, sampling=DraftSampling.IID),
    ),
    "unconditional-q": Plant(
        "siblings drawn without replacement, each judged by the whole q",
        draft=None,
        tree=partial(_WithoutReplacementAsIid, tree=_FORK, sampling=DraftSampling.WITHOUT_REPLACEMENT),
    ),
    "sorted-siblings": Plant(
        "drawn siblings tried in the order of q, not of the draws",
        draft=None,
        tree=partial(_SortedSiblings, tree=_FORK, sampling=DraftSampling.WITHOUT_REPLACEMENT),
    ),
}
