"""Proposers whose drafts are tables: the plainest trees of every sampling, and trees with planted bugs.

They are no drafter of anybody's: rules are tried on them, and plants change them. The drafters that
ship are in `nets.py` and `../toys.py`. Read next: `../plants.py`.

Shapes: B rows, N nodes, V vocabulary, K children.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ....decoding.proposal import Committed, DraftSampling, Proposal
from ....decoding.random import Uniforms
from ....decoding.sampling import Warper
from ....decoding.tree.build import draw_siblings, dynamic_tree
from ....decoding.tree.merge import merge
from ....decoding.tree.tree import Tree
from .table import TableModel


class _Tables:
    """What the proposers below share: no state between steps."""

    replayable = True
    draft_length = 2
    draft_steps = 2
    nodes = 16

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Nothing to remember."""

    def observe(self, committed: Committed) -> None:
        """Nothing to roll back."""


class SampledTree(_Tables):
    """A static tree whose siblings are drawn from a draft's distribution, as EAGLE-1 and Sequoia do."""

    def __init__(self, draft: TableModel, tree: Tree, sampling: DraftSampling) -> None:
        self.draft, self.tree, self.sampling = draft, tree, sampling

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Draw the tree from the root down."""
        random_BN = uniforms.take(len(self.tree))
        tokens, present = [last_B], [torch.ones_like(last_B, dtype=torch.bool)]
        distributions = []
        for node, children in enumerate(self.tree.children):
            distributions.append(warper(self.draft.logits_VV[tokens[node]]))
            if children:
                drawn = self.siblings(distributions[-1], random_BN[:, list(children)])
                tokens += list(drawn[0].unbind(1))
                present += [each & present[node] for each in drawn[1].unbind(1)]
        # children of a node stand together in our trees, in the order of their parents
        return Proposal(
            torch.stack(tokens, 1),
            self.tree,
            self.sampling,
            torch.stack(distributions, 1),
            present_BN=torch.stack(present, 1),
        )

    def siblings(self, probs_BV: Tensor, uniform_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of one node's children and which are there; a planted bug changes this."""
        return draw_siblings(probs_BV, uniform_BC, replace=self.sampling is DraftSampling.IID)


class TopTree(_Tables):
    """A static tree of a draft's likeliest tokens, as Medusa's."""

    def __init__(self, draft: TableModel, tree: Tree) -> None:
        self.draft, self.tree = draft, tree

    def propose(self, last_B: Tensor, _warper: Warper, _uniforms: Uniforms) -> Proposal:
        """The top children of every node."""
        order_VV = self.draft.logits_VV.argsort(-1, descending=True)
        tokens = [last_B]
        for node, children in enumerate(self.tree.children):
            tokens += [order_VV[tokens[node], rank] for rank in range(len(children))]
        return Proposal(torch.stack(tokens, 1), self.tree, DraftSampling.POINT_MASS)


class ConfidentTree(_Tables):
    """A dynamic tree by path confidence, as EAGLE-2's."""

    def __init__(self, draft: TableModel) -> None:
        self._log_VV = draft.logits_VV.log_softmax(-1)

    def propose(self, last_B: Tensor, _warper: Warper, _uniforms: Uniforms) -> Proposal:
        """Two levels of two, of which the best five are kept."""

        def best(tokens: Tensor) -> tuple[Tensor, Tensor]:
            best_two = self._log_VV[tokens].topk(2, dim=-1)
            return best_two.values, best_two.indices

        def expand(tokens_BK: Tensor, _parent_BK: Tensor, _level: int) -> tuple[Tensor, Tensor]:
            return best(tokens_BK)

        tokens_BN, tree = dynamic_tree(last_B, best(last_B), expand, depth=2, top_k=2, nodes=6)
        return Proposal(tokens_BN, tree, DraftSampling.POINT_MASS)


class SeveralDrafts(_Tables):
    """The merged trees of several drafts, each with its own distribution, as SpecInfer's."""

    def __init__(self, drafts: Sequence[TableModel], trees: Sequence[Tree]) -> None:
        self._drafts = [SampledTree(d, t, DraftSampling.IID) for d, t in zip(drafts, trees, strict=True)]

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Every draft's tree, merged."""
        made = [each.propose(last_B, warper, uniforms) for each in self._drafts]
        parents = [torch.tensor(each.tree.parents, device=last_B.device) for each in self._drafts]
        merged = merge(
            last_B, [p.tokens_BN for p in made], parents, [cast(Tensor, p.q_BNV) for p in made], depth=2, width=4
        )
        return Proposal(
            merged.tokens_BN, merged.tree, DraftSampling.SEVERAL, present_BN=merged.present_BN, trials=merged.trials
        )
