"""Hydra: Medusa's heads, each of which also sees the tokens drafted before its own.

Ankner et al. 2024, arXiv 2402.05109. A tree is drafted level by level, every node from the path
that leads to it. The heads that `trainers/hydra.py` trains are the very heads that draft here.
Read next: `medusa.py`, with which nearly everything is shared.

Shapes: B rows, K nodes expanded at once, R ranks, X nodes of the next depth, Y of them that are
expanded in turn, H hidden size, F numbers that a head reads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..decoding.backbone import Backbone
from ..decoding.proposal import Law, Proposal
from ..decoding.random import Uniforms
from ..decoding.sampling import Warper
from ..decoding.tree_build import Choices
from .checkpoint import load_weights, read_settings
from .medusa import (
    HeadsOnTree,
    MedusaHeads,
    MedusaShape,
    Paths,
    ResidualBlock,
    head_logits,
    projection_of,
)


class HydraBlock(nn.Module):
    """h + SiLU(W [h; e_1; ...; e_k] + b), then residual blocks; h as it is until it is trained.

    The published code passes h on through a random linear map in place of the identity.
    """

    def __init__(self, hidden: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.first = nn.Linear((1 + tokens) * hidden, hidden)
        for parameter in self.first.parameters():
            nn.init.zeros_(parameter)
        self.rest = ResidualBlock(hidden, layers - 1)

    def forward(self, given_XF: Tensor) -> Tensor:
        return self.rest(given_XF[..., : self.hidden] + F.silu(self.first(given_XF)))


class HydraHeads(MedusaHeads):
    """K heads; head k at position t reads h_t and the embeddings of tokens t+1 to t+k.

    It speaks of token t+k+1, as Medusa's does; `layers` 4 gives the deeper heads of Hydra++. Token
    t+1 is known when drafting begins: it is the tree's root. Embeddings are the target's, passed
    in and never saved.
    """

    def block(self, k: int) -> nn.Module:
        """What head k, counted from 1, computes in front of its projection."""
        return HydraBlock(self.config.hidden, self.config.layers, tokens=k)

    def forward(self, hidden_XH: Tensor, embeds: Sequence[Tensor] = ()) -> Tensor:
        """[..., H] and the embeddings of the K tokens behind -> [..., K, H], text being known."""
        return torch.stack(
            [block(reads(hidden_XH, embeds[:k])) for k, block in enumerate(self.blocks, 1)], -2
        )


def reads(hidden_XH: Tensor, embeds: Sequence[Tensor]) -> Tensor:
    """What a head reads: the target's hidden state, then the tokens behind it, oldest first."""
    return torch.cat([hidden_XH, *(each.to(hidden_XH.dtype) for each in embeds)], -1)


class Hydra(HeadsOnTree):
    """Fills the tree level by level, every node from the path that leads to it."""

    family = "hydra"

    def __init__(
        self, heads: HydraHeads, target: Backbone, *, paths: Paths | None = None, nodes: int = 20
    ) -> None:
        """As `HeadsOnTree`."""
        super().__init__(heads, target, paths=paths, nodes=nodes)
        self._embed: Any = target.model.get_input_embeddings()

    @property
    def draft_steps(self) -> int:
        """Heads that run one after another per target call."""
        return self.draft_length

    def propose(self, last_B: Tensor, _warper: Warper, _uniforms: Uniforms) -> Proposal:
        """The tree behind `last_B`, every node the likeliest behind its path."""
        tokens = [last_B[:, None]]
        hidden_BH = self._hidden_BH.to(self.heads.dtype)
        given_BKF = reads(hidden_BH, [self._embed(last_B)])[:, None]
        for depth, level in enumerate(_levels(self._choices, last_B.device)):
            topk_BKR = self.logits(depth, given_BKF).topk(level.ranks).indices
            tokens.append(topk_BKR.flatten(1)[:, level.pick_X])
            embeds_BYH = self._embed(tokens[-1][:, level.inner_Y])
            given_BKF = reads(given_BKF[:, level.parent_Y], [embeds_BYH])
        return Proposal(torch.cat(tokens, 1), self._choices.tree, Law.POINT_MASS)

    def logits(self, depth: int, given_BKF: Tensor) -> Tensor:
        """fp32 logits [B, K, V] of the tokens behind some nodes; the root has depth 0."""
        hidden_BKH = self.heads.blocks[depth](given_BKF)
        return head_logits(self.heads, depth, hidden_BKH, projection_of(self._target.model))


class _Level(NamedTuple):
    """From the expanded nodes of one depth to those of the next."""

    ranks: int  # candidates taken of every node
    pick_X: Tensor  # where the nodes of the next depth stand in [K, R]
    inner_Y: Tensor  # which of them are expanded in turn
    parent_Y: Tensor  # places in K of the parents of those


@lru_cache(maxsize=64)
def _levels(choices: Choices, device: torch.device) -> tuple[_Level, ...]:
    """The levels of a tree whose nodes are ordered by depth; kept, as copying them would wait."""
    tree, ranks = choices.tree, choices.ranks
    levels, expanded = [], [0]
    for depth in range(1, tree.depth + 1):
        nodes = [node for node in range(len(tree)) if tree.depths[node] == depth]
        width = 1 + max(ranks[node] for node in nodes)
        place = {node: expanded.index(tree.parents[node]) for node in nodes}
        inner = [at for at, node in enumerate(nodes) if tree.children[node]]
        lists = (
            [place[node] * width + ranks[node] for node in nodes],
            inner,
            [place[nodes[at]] for at in inner],
        )
        tensors = (torch.tensor(each, dtype=torch.long, device=device) for each in lists)
        levels.append(_Level(width, *tensors))
        expanded = [nodes[at] for at in inner]
    return tuple(levels)


def load_hydra(
    folder: str | Path, target: Backbone, *, paths: Paths | None = None, nodes: int = 20
) -> Hydra:
    """Load a Hydra checkpoint for `target`; the tree is as for `Hydra`.

    Raises:
        RequestError: the folder is no Hydra drafter, or was made for another target; the message
            names the field that differs.
    """
    heads = HydraHeads(MedusaShape(**read_settings(folder, target, Hydra.family)[1]))
    load_weights(heads, Path(folder))
    heads.requires_grad_(False).eval().to(device=target.device, dtype=target.model.dtype)
    return Hydra(heads, target, paths=paths, nodes=nodes)
