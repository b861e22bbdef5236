"""Every method in miniature: a target and drafts that are tables, decoded by the real engine.

The distribution of a table is known in closed form, so that whole sequences can be counted against it
(`enumeration.py`). Only the models are small: proposers, trees, rules and engine are those that
decode real text. Read next: `enumeration.py`, `survey.py`.

Shapes: B rows, N nodes, V vocabulary, K children.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.datastore import Datastore
from ...decoding.proposal import Committed, DraftSampling, Proposal, Proposer
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper
from ...decoding.target.backbone import Backbone, Seen
from ...decoding.target.kv_cache import KVCache
from ...decoding.tree.build import dynamic_tree
from ...decoding.tree.merge import merge
from ...decoding.tree.siblings import draw_siblings
from ...decoding.tree.tree import AnyTree, Tree
from ...drafters.lookup.function import CallableDrafter
from ...drafters.lookup.llma import Llma
from ...drafters.lookup.lookahead import Lookahead
from ...drafters.lookup.ngram import Ngram, NgramTable
from ...drafters.lookup.prompt_lookup import PromptLookup
from ...drafters.lookup.rest import Rest
from ...drafters.model.adaptive import AdaptiveDraft
from ...drafters.model.draft_model import DraftModel, Policy
from ...drafters.model.ensemble import Ensemble, join
from ...drafters.vocabulary.foreign_draft import ForeignDraft, IntersectionDraft, RetokenisedDraft
from ...drafters.vocabulary.shared_tokens import Vocabulary, VocabularyPair
from ...errors import RequestError

VOCABULARY = 3
PROMPT = [0, 1, 2, 0, 2, 1, 1, 0]
_DOCUMENTS = [[0, 1, 0, 2, 2, 1], [2, 0, 0, 1, 2, 1, 1], [1, 0, 2, 0]]


class TableModel:
    """A language model whose next token depends on the last one alone. Stands for a `Backbone`."""

    name, context, device = "table", 2**31, torch.device("cpu")

    def __init__(self, logits_VV: Tensor) -> None:
        """Row v: logits of the token behind v."""
        self.logits_VV = logits_VV

    def prefill(self, prompts: Sequence[Sequence[int]], _kv_cache: KVCache, **_features: Any) -> Tensor:
        """Logits behind the last token of every prompt, [B, V]."""
        return self.logits_VV[torch.tensor([prompt[-1] for prompt in prompts])]

    def forward(
        self, tokens_BN: Tensor, _lengths_B: Tensor, _tree: AnyTree, _kv_cache: KVCache, *, keep: int = 0
    ) -> Tensor:
        """Logits [B, N, V] of every node."""
        logits_BNV = self.logits_VV[tokens_BN]
        return logits_BNV[:, -keep:] if keep else logits_BNV

    def see(self, tokens_BN: Tensor, lengths_B: Tensor, tree: AnyTree, kv_cache: KVCache, **_layers: Any) -> Seen:
        """`forward`; a table has no hidden states."""
        return Seen(self.forward(tokens_BN, lengths_B, tree, kv_cache), None)

    def as_backbone(self) -> Backbone:
        """What the engine and the draft model take it for."""
        return cast(Backbone, self)


def tables(seed: int, drafts: int = 2) -> tuple[TableModel, list[TableModel]]:
    """A target, and drafts that resemble it."""
    g = torch.Generator().manual_seed(seed)
    shape = (VOCABULARY, VOCABULARY)
    target_VV = 0.8 * torch.randn(shape, generator=g)
    others = [target_VV + 0.8 * torch.randn(shape, generator=g) for _ in range(drafts)]
    return TableModel(target_VV), [TableModel(logits_VV) for logits_VV in others]


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
                found = self.siblings(distributions[-1], random_BN[:, list(children)])
                tokens += list(found[0].unbind(1))
                present += [each & present[node] for each in found[1].unbind(1)]
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
            found = self._log_VV[tokens].topk(2, dim=-1)
            return found.values, found.indices

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
        parents = [torch.tensor(each.tree.parents) for each in self._drafts]
        merged = merge(
            last_B, [p.tokens_BN for p in made], parents, [cast(Tensor, p.q_BNV) for p in made], depth=2, width=4
        )
        return Proposal(
            merged.tokens_BN, merged.tree, DraftSampling.SEVERAL, present_BN=merged.present_BN, trials=merged.trials
        )


_FORK = Tree((-1, 0, 0, 1, 1, 2))
_PAIR = Tree((-1, 0, 1))

MakeProposer = Callable[[Sequence[TableModel]], Proposer]


class _MemoryStore:
    """The look-up of a datastore, over documents in memory."""

    @staticmethod
    def trie(continuations: NDArray[np.int64], nodes: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the most frequent prefixes."""
        return _trie(continuations.tobytes(), continuations.shape, nodes)

    def continuations(
        self, context: Sequence[int], *, longest: int, shortest: int, length: int, limit: int
    ) -> NDArray[np.int64]:
        """What follows the longest suffix that occurs, [M, length], -1 padded."""
        return _follow(tuple(context), longest, shortest, length, limit)


@lru_cache(maxsize=1024)
def _trie(data: bytes, shape: tuple[int, ...], nodes: int) -> tuple[list[int], list[int]]:
    return Datastore.trie(np.frombuffer(data, dtype=np.int64).reshape(shape), nodes)


@lru_cache(maxsize=1024)
def _follow(context: tuple[int, ...], longest: int, shortest: int, length: int, limit: int) -> NDArray[np.int64]:
    for size in range(min(longest, len(context)), shortest - 1, -1):
        wanted = list(context[-size:])
        found = [
            (text[at + size : at + size + length] + [-1] * length)[:length]
            for text in _DOCUMENTS
            for at in range(len(text) - size)
            if text[at : at + size] == wanted
        ]
        if found:
            return np.array(found[:limit], dtype=np.int64)
    return np.empty((0, length), dtype=np.int64)


def _draft(kind: type[DraftModel], drafts: Sequence[TableModel], **settings: Any) -> Proposer:
    return kind(drafts[0].as_backbone(), VOCABULARY, **settings)


def _ensemble(drafts: Sequence[TableModel], **settings: Any) -> Proposer:
    return join([cast(DraftModel, _draft(DraftModel, [d], **settings)) for d in drafts[:2]])


# the third token of each is a text that the other writes by two
_LETTERS = VocabularyPair(Vocabulary([b"a", b"b", b"ba"]), Vocabulary([b"a", b"b", b"ab"]))


def _foreign(kind: type[ForeignDraft], drafts: Sequence[TableModel], *, policy: Policy = "sample") -> Proposer:
    draft = drafts[0].as_backbone()
    return kind(draft, _LETTERS, VOCABULARY, draft_length=2, policy=policy)


MINIATURES: dict[str, MakeProposer] = {
    "draft-model": partial(_draft, DraftModel, draft_length=2),
    "draft-model argmax": partial(_draft, DraftModel, draft_length=2, policy="argmax"),
    "intersection": partial(_foreign, IntersectionDraft),
    "intersection argmax": partial(_foreign, IntersectionDraft, policy="argmax"),
    "retokenised": partial(_foreign, RetokenisedDraft),
    "adaptive-draft": partial(_draft, AdaptiveDraft, longest=3, cost=0.05),
    "tree, without replacement": lambda d: SampledTree(d[0], _FORK, DraftSampling.WITHOUT_REPLACEMENT),
    "tree, independent draws": lambda d: SampledTree(d[0], _FORK, DraftSampling.IID),
    "tree, likeliest tokens": lambda d: TopTree(d[0], _FORK),
    "tree, by confidence": lambda d: ConfidentTree(d[0]),
    "ensemble": partial(_ensemble, draft_length=2),
    "ensemble argmax": partial(_ensemble, draft_length=2, policy="argmax"),
    "several drafts, merged": lambda d: SeveralDrafts(d, [_PAIR, _FORK]),
    "prompt-lookup": lambda _: PromptLookup(draft_length=2),
    "ngram": lambda _: Ngram(NgramTable.count(_DOCUMENTS, order=3, vocabulary=3), draft_length=2),
    "llma": lambda _: Llma(_DOCUMENTS, draft_length=2),
    "rest": lambda _: Rest(_MemoryStore(), nodes=6, longest=2, shortest=1, draft_length=2),
    "lookahead": lambda _: Lookahead(window=2, ngram=3, guesses=2, pool=4),
    "function": lambda _: CallableDrafter(lambda text: [text[-1], text[0]], draft_length=2),
}


def miniature_of(drafter: Proposer) -> str:
    """The miniature of a drafter's method.

    Raises:
        RequestError: there is none, so that the audit could not prove the method.
    """
    name = str(getattr(drafter, "family", type(drafter).__name__)).replace("_", "-")
    if name in ("medusa", "hydra", "hydra++", "bpd"):
        name = "tree, likeliest tokens"
    if name in ("eagle", "eagle3"):
        name = _eagle(drafter)
    if name in ("quantised", "early-exit"):
        name = "draft-model"
    if isinstance(drafter, DraftModel) and name == "draft-model" and drafter.policy == "argmax":
        name = "draft-model argmax"
    if isinstance(drafter, Ensemble) and drafter.members[0].policy == "argmax":
        name = "ensemble argmax"
    if name == "intersection" and getattr(drafter, "policy", None) == "argmax":
        name = "intersection argmax"
    if name not in MINIATURES:
        raise RequestError(f"the audit knows no drafter of family {name!r}; known: {', '.join(MINIATURES)}")
    return name


def _eagle(drafter: Any) -> str:
    if drafter.kind == "dynamic":
        return "tree, by confidence"
    if drafter.policy == "argmax":
        return "draft-model argmax" if drafter.kind == "chain" else "tree, likeliest tokens"
    return "draft-model" if drafter.kind == "chain" else "tree, without replacement"


@dataclass(frozen=True)
class Miniature:
    """A pair of tables by the name of its method."""

    name: str
    target: TableModel
    drafts: list[TableModel]

    @classmethod
    def of(cls, name: str, seed: int) -> Miniature:
        target, drafts = tables(seed)
        return cls(name, target, drafts)

    def proposer(self) -> Proposer:
        """A fresh one."""
        return MINIATURES[self.name](self.drafts)
