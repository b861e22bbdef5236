"""An independent draft model: a small causal LM with an arena of its own, drafting a chain.

Leviathan et al. 2023, Chen et al. 2023. The module that `trainers/distill.py` trains is the very
module that drafts here. Read next: `identity.py`, `registry.py`.

Shapes: B rows, K drafted tokens, V target vocabulary, L tokens of history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..decoding.arena import KVArena
from ..decoding.backbone import Backbone
from ..decoding.proposal import Committed, Law, Proposal
from ..decoding.random import Uniforms
from ..decoding.sampling import Warper, draw
from ..decoding.tree import chain

Policy = Literal["sample", "argmax"]


class DraftModel:
    """Drafts `draft_length` tokens one after another.

    `policy` matters at temperature > 0: `sample` draws from the draft's warped law and declares
    it (IID); `argmax` takes the likeliest token and declares a point mass.
    """

    family = "draft_model"

    def __init__(
        self, backbone: Backbone, vocabulary: int, *, draft_length: int = 4,
        policy: Policy = "sample",
    ) -> None:  # fmt: skip
        """`vocabulary`: rows of the target's output projection, the width of q."""
        self.backbone, self.vocabulary = backbone, vocabulary
        self.draft_length, self.policy = draft_length, policy

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self.backbone.model

    def reset(self, prompts: Sequence[Sequence[int]], room: int) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        device = self.backbone.device
        capacity = max(map(len, prompts)) + room + self.draft_length + 2
        self._arena = KVArena(len(prompts), capacity)
        self.backbone.prefill(prompts, self._arena)
        self._lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._known_B = self._lengths_B.clone()
        self._history_BL = torch.zeros(len(prompts), capacity, dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            self._history_BL[row, : len(prompt)] = torch.tensor(list(prompt))

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """A chain behind `last_B`: argmax at temperature 0, else by `policy`."""
        sampled = not warper.greedy and self.policy == "sample"
        self._history_BL.scatter_(1, self._lengths_B[:, None], last_B[:, None])
        random_BK = uniforms.take(self.draft_length) if sampled else None
        tokens, laws = [last_B], []
        logits_BV = self._catch_up()
        for k in range(self.draft_length):
            if k:
                logits_BV = self._step(tokens[-1], self._lengths_B + k)
            if random_BK is None:
                tokens.append(logits_BV.argmax(-1))
                continue
            law_BV = warper(logits_BV)
            laws.append(law_BV)
            tokens.append(self.choose(law_BV, random_BK[:, k]))
        tree = chain(self.draft_length)
        if random_BK is None:
            return Proposal(torch.stack(tokens, 1), tree, Law.POINT_MASS)
        laws.append(torch.zeros_like(laws[0]))  # the last node is a leaf: its row is never read
        return Proposal(torch.stack(tokens, 1), tree, Law.IID, torch.stack(laws, 1))

    def choose(self, law_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """One token per row from the law that is declared as q."""
        return draw(law_BV, uniform_B)

    def observe(self, committed: Committed) -> None:
        """Go on behind what was committed; what stands in the arena of it is kept.

        Before the step the arena held everything up to the root, and the root; drafting added all
        drafted tokens but the last. So after a full acceptance one token is missing.
        """
        B, E = committed.tokens_BE.shape
        slots_BE = self._lengths_B[:, None] + 1 + torch.arange(E, device=committed.count_B.device)
        slots_BE = slots_BE.clamp_max(self._history_BL.shape[1] - 1)
        self._history_BL.scatter_(1, slots_BE, committed.tokens_BE)
        written_B = self._lengths_B + self.draft_length
        self._lengths_B = self._lengths_B + committed.count_B
        self._known_B = torch.minimum(written_B, self._lengths_B)

    def _catch_up(self) -> Tensor:
        """Feed what the arena lacks, the last emitted token included; logits behind it."""
        width = int((self._lengths_B + 1 - self._known_B).max())
        # rows that lack less see some tokens again, written over with the same values
        start_B = self._lengths_B + 1 - width
        slots_BW = start_B[:, None] + torch.arange(width, device=start_B.device)
        tokens_BW = self._history_BL.gather(1, slots_BW)
        return self._logits(tokens_BW, start_B)

    def _step(self, tokens_B: Tensor, at_B: Tensor) -> Tensor:
        return self._logits(tokens_B[:, None], at_B)

    def _logits(self, tokens_BW: Tensor, start_B: Tensor) -> Tensor:
        """Logits [B, V] behind the last of W tokens, as wide as the target's."""
        tree = chain(tokens_BW.shape[1] - 1)
        logits_BV = self.backbone.forward(tokens_BW, start_B, tree, self._arena, keep=1)[:, -1]
        return fit_vocabulary(logits_BV, self.vocabulary)


def fit_vocabulary(logits_BV: Tensor, vocabulary: int) -> Tensor:
    """Cut or pad the padding rows of a head: a token that one side lacks is never drafted."""
    own = logits_BV.shape[-1]
    if own > vocabulary:
        return logits_BV[:, :vocabulary]
    if own < vocabulary:
        return nn.functional.pad(logits_BV, (0, vocabulary - own), value=-torch.inf)
    return logits_BV
