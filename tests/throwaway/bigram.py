"""A family that is nowhere in the package: a bigram network that drafts chains, as its module would be.

What the next token may be depends on the last one alone. It is here to show what a new family takes:
this module, `bigram_trainer.py` and the records in `records.py`.

Shapes: B rows, K drafted tokens, V vocabulary, H inner size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.proposal import Committed, DraftSampling, Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper, draw
from draftsmith.decoding.tree.tree import chain
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.export import Export, Served, ServedTarget
from draftsmith.drafters.folder import read_settings
from draftsmith.drafters.weights import net_for
from torch import Tensor, nn


@dataclass(frozen=True)
class BigramShape:
    """Sizes of a bigram network."""

    vocabulary: int
    inner: int


class BigramNet(nn.Module):
    """Logits of the token behind a token."""

    family = "bigram"

    def __init__(self, config: BigramShape) -> None:
        super().__init__()
        self.config = config
        self.inner = nn.Embedding(config.vocabulary, config.inner)
        self.outer = nn.Linear(config.inner, config.vocabulary, bias=False)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> BigramNet:
        return cls(BigramShape(**settings))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.outer(self.inner(tokens))


class Bigram:
    """Drafts a chain token by token."""

    family = "bigram"
    replayable = True

    def __init__(self, net: BigramNet, draft_length: int) -> None:
        self.module, self.draft_length = net, draft_length
        self.nodes, self.draft_steps = draft_length + 1, draft_length

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Nothing to remember."""

    def observe(self, committed: Committed) -> None:
        """Nothing to roll back."""

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        random_BK = uniforms.take(self.draft_length)
        tokens, q = [last_B], []
        for k in range(self.draft_length):
            q.append(warper(self.module(tokens[-1]).float()))
            tokens.append(draw(q[-1], random_BK[:, k]))
        q.append(torch.zeros_like(q[-1]))  # of the leaf, never read
        return Proposal(torch.stack(tokens, 1), chain(self.draft_length), DraftSampling.IID, torch.stack(q, 1))


def load(folder: Path, target: Backbone, *, draft_length: int, config: DrafterConfig) -> Bigram:
    _, settings = read_settings(folder, target, "bigram")
    net = net_for(folder, target, lambda: BigramNet.from_settings(settings), "a bigram network")
    return draft_by(net, target, draft_length)


def draft_by(net: BigramNet, _target: Backbone, draft_length: int) -> Bigram:
    return Bigram(net, draft_length)


def toy(target: Any, _drafts: Sequence[Any]) -> Bigram:
    """The proposer over a network of three tokens, for the audit to enumerate."""
    torch.manual_seed(0)
    return Bigram(BigramNet(BigramShape(target.vocabulary, 4)).requires_grad_(False).eval(), draft_length=2)


def export(net: BigramNet, target: ServedTarget, _how: Served) -> Export:
    return Export({"architectures": ["Bigram"], "vocab_size": target.vocabulary}, net.state_dict())
