"""Draft models whose tokenizer is not the target's: two ways, each with what keeps it lossless.

- *Intersection* ("token-level intersection", Timor et al. 2025, arXiv 2502.05202). Tokens that both
  vocabularies have map one to one. The draft's distribution is restricted to them and renormalised,
  q'(x) = q(x) / q(shared), before the warper; tokens are drawn from q', and the proposal's q is q'
  over the target's vocabulary. So rejection sampling is exact. With q itself, whose mass outside was
  never drawn, it would not be.
- *Re-tokenisation*. The draft writes tokens of its own, greedily; their text is written anew in the
  target's tokens, after the committed text, and proposed as a point mass. Sample-and-match is
  exact for whatever is proposed without looking at the coins of acceptance.

Read next: `translated_rows.py`, how the draft reads; `vocabulary/shared_tokens.py`, which tokens are the same.

Shapes: B rows, K drafted tokens, V target vocabulary, D the draft's, I shared tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...decoding.proposal import Committed, DraftSampling, Proposal
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper, draw
from ...decoding.tree.tree import chain
from ...errors import RequestError
from ..model.chains import chain_of
from ..temperatures import Policy, at_depth, samples
from .shared_tokens import VocabularyPair
from .translated_rows import TranslatedRows

_TAIL = 12  # tokens of the committed text that a drafted one is written after


class ForeignDraft(ABC):
    """What both ways share: a draft that reads and writes its own tokens."""

    replayable = False  # the host translates
    family = ""

    def __init__(
        self,
        backbone: Backbone,
        pair: VocabularyPair,
        vocabulary: int,
        *,
        draft_length: int = 4,
        policy: Policy = "sample",
        factors: Sequence[float] = (),
    ) -> None:
        """`vocabulary`: rows of the target's output projection; `policy` and `factors` as of a `DraftModel`.

        Raises:
            RequestError: the draft has recurrent layers.
        """
        if backbone.is_recurrent:
            raise RequestError(
                f"the draft {backbone.name} has recurrent layers, and one with another tokenizer than the target's "
                "reads its text anew from any token, of which they keep no state; expected attention in every "
                "layer, or a draft with the target's tokenizer"
            )
        self.backbone, self.pair, self.vocabulary = backbone, pair, vocabulary
        self.draft_length, self.policy, self.factors = draft_length, policy, tuple(factors)
        self.rows = TranslatedRows(backbone, pair)

    @property
    def module(self) -> nn.Module:
        """What drafts."""
        return self.backbone.model

    @property
    def nodes(self) -> int:
        """Most nodes of a proposal, the root included."""
        return self.draft_length + 1

    @property
    def draft_steps(self) -> int:
        """Forward passes per target call."""
        return self.draft_length

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        room += self.draft_length + 2
        self.rows.reset(prompts, room, ahead=self.draft_length)

    @abstractmethod
    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Draft after `last_B`, the last emitted token of every row."""

    def observe(self, committed: Committed) -> None:
        """Continue after what was committed."""
        self.rows.observe(committed)


class IntersectionDraft(ForeignDraft):
    """Drafts tokens that both vocabularies have, from the draft's distribution on them."""

    family = "intersection"

    def __init__(
        self,
        backbone: Backbone,
        pair: VocabularyPair,
        vocabulary: int,
        *,
        draft_length: int = 4,
        policy: Policy = "sample",
        factors: Sequence[float] = (),
    ) -> None:
        """As a `ForeignDraft`; raises RequestError where there is nothing that both have."""
        super().__init__(backbone, pair, vocabulary, draft_length=draft_length, policy=policy, factors=factors)
        if not pair.shared:
            raise RequestError("draft and target have no token in common; expected drafter.vocabulary: retokenise")
        device = backbone.device
        own_I, theirs_I = torch.tensor(pair.shared, device=device).unbind(1)
        self._own_I, self._theirs_I = own_I, theirs_I
        self._own_V = torch.zeros(vocabulary, dtype=torch.long, device=device)
        self._own_V[theirs_I] = own_I

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """A chain after `last_B`: argmax at temperature 0, else by `policy`."""
        random_BK = uniforms.take(self.draft_length) if samples(warper, self.policy) else None
        tokens, q = [last_B], []
        logits_BD = self.rows.read(last_B)
        for k in range(self.draft_length):
            if k:
                logits_BD = self.rows.write(self._own_V[tokens[-1]])
            logits_BV = self.restricted(logits_BD)
            if random_BK is None:
                tokens.append(logits_BV.argmax(-1))
                continue
            probs_BV = at_depth(warper, self.factors, k)(logits_BV)
            q.append(self.declare(logits_BD, probs_BV))
            tokens.append(draw(probs_BV, random_BK[:, k]))
        drafted_B = self.rows.drafted()
        present_BN = None
        if drafted_B is not None:
            present_BN = drafted_B[:, None] | (torch.arange(self.nodes, device=last_B.device) == 0)
        return chain_of(tokens, q, present_BN=present_BN, coins=self.nodes)

    def restricted(self, logits_BD: Tensor) -> Tensor:
        """Logits over the target's vocabulary; tokens that the draft does not have get probability zero."""
        logits_BV = logits_BD.new_full((len(logits_BD), self.vocabulary), -torch.inf)
        logits_BV[:, self._theirs_I] = logits_BD[:, self._own_I]
        return logits_BV

    def declare(self, _logits_BD: Tensor, probs_BV: Tensor) -> Tensor:
        """q of the proposal: the distribution that the token is drawn from."""
        return probs_BV


class RetokenisedDraft(ForeignDraft):
    """Drafts a text of `draft_length` own tokens, proposed in as many of the target's at most."""

    family = "retokenised"

    def propose(self, last_B: Tensor, _warper: Warper, _uniforms: Uniforms) -> Proposal:
        """The draft's likeliest text after `last_B`; a row may find fewer tokens, or none."""
        own = [self.rows.read(last_B).argmax(-1)]
        while len(own) < self.draft_length:
            own.append(self.rows.write(own[-1]).argmax(-1))
        written = torch.stack(own, 1).tolist()
        drafted_B = self.rows.drafted()
        drafted = [
            self.pair.after(tail, tuple(ids))[: self.draft_length]
            for tail, ids in zip(self.rows.tail(_TAIL), written, strict=True)
        ]
        filled = [[*ids, *[0] * (self.draft_length - len(ids))] for ids in drafted]
        device = last_B.device
        count_B = torch.tensor([len(ids) for ids in drafted], device=device)
        count_B = count_B if drafted_B is None else count_B * drafted_B
        at_N = torch.arange(self.nodes, device=device)
        return Proposal(
            torch.cat([last_B[:, None], torch.tensor(filled, device=device)], 1),
            chain(self.draft_length),
            DraftSampling.POINT_MASS,
            present_BN=at_N <= count_B[:, None],
            coins=self.nodes,
        )
